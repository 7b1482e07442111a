"""BatchNorm's statistics measured again before an evaluation, as EfficientViT does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from linvit.training.callbacks.callback import Callback
from linvit.training.config import Config
from linvit.training.contract import Batch, BatchSource, Task
from linvit.training.processes import Processes

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BatchNormStatistics(Callback):
    """Measures them on the first images of the training set, as they come augmented but not mixed."""

    def __init__(self, config: Config, source: BatchSource, task: Task, processes: Processes) -> None:
        self.count = -(-config.bn_images * config.accumulate // config.batch_size)
        self.source, self.task, self.processes = source, task, processes

    def before_evaluation(self, model: nn.Module) -> None:
        batches = islice(self.source.epoch(0, mixed=False), self.count)
        with self.processes.autocast():
            measure_batch_norm(model, batches, self.task.forward, self.processes.mean)


@torch.no_grad()
def measure_batch_norm(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[nn.Module, Batch], object],
    over_processes: Callable[[Tensor], Tensor],
) -> None:
    """Replace BatchNorm's running statistics by the mean over these batches, and over those of all processes; the rest
    of the model stays in evaluation mode, so that nothing is dropped."""
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
    for batch in batches:
        forward(model, batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        for statistic in (norm.running_mean, norm.running_var):
            if statistic is not None:
                statistic.copy_(over_processes(statistic.clone()))
    model.train(training)
