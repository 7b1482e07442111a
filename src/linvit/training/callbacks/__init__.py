"""What only some recipes need: the moving average, MESA, Castling's masks, drop path, BatchNorm, image sizes."""

from __future__ import annotations

from torch import nn

from linvit.training.callbacks.average import Average
from linvit.training.callbacks.batch_norm import BatchNormStatistics
from linvit.training.callbacks.callback import Callback
from linvit.training.callbacks.drop_path import DropPathProgress
from linvit.training.callbacks.masks import Masks
from linvit.training.callbacks.mesa import Mesa
from linvit.training.callbacks.random_sizes import RandomSizes
from linvit.training.config import Config
from linvit.training.contract import BatchSource, Task
from linvit.training.processes import Processes


def make_callbacks(
    config: Config, model: nn.Module, processes: Processes, source: BatchSource, task: Task, steps: int
) -> list[Callback]:
    """In the order in which they are called: MESA after the average it learns from."""
    made: list[Callback] = []
    drop_path, masks = DropPathProgress(model), Masks(model, anneal=config.sparse_anneal, steps=steps)
    made += [drop_path] if drop_path.progress else []
    made += [masks] if masks.names else []
    made += [RandomSizes(config, task)] if config.random_sizes else []
    if config.ema is not None:
        average = Average(model, config.ema, config.ema_ramp)
        made += [average, Mesa(config, model, average, processes)] if config.mesa else [average]
    return [*made, BatchNormStatistics(config, source, task, processes)] if config.bn_images else made
