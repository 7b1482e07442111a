"""BatchNorm's statistics measured again before an evaluation, as EfficientViT does."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from linvit.training.callbacks.callback import Callback
from linvit.training.config import Config
from linvit.training.contract import BatchSource, Task
from linvit.training.processes import Processes

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BatchNormStatistics(Callback):
    """Replaces the running statistics by the mean over the first images of the training set, as they come augmented
    but not mixed, and over all processes. The rest of the model stays in evaluation mode, so nothing is dropped."""

    def __init__(self, config: Config, source: BatchSource, task: Task, processes: Processes) -> None:
        self.count = -(-config.bn_images * config.accumulate // config.batch_size)
        self.source, self.task, self.processes = source, task, processes

    @torch.no_grad()
    def before_evaluation(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, NORMS) and module.track_running_stats]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        training = model.training
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean
            norm.train()
        with self.processes.autocast():
            for batch in islice(self.source.epoch(0, mixed=False), self.count):
                self.task.forward(model, batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic in (norm.running_mean, norm.running_var):
                if statistic is not None:
                    statistic.copy_(self.processes.mean(statistic))
        model.train(training)
