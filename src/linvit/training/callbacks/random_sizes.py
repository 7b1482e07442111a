"""Image sizes by turns, as EfficientViT trains."""

from __future__ import annotations

import torch

from linvit.training.callbacks.callback import Callback
from linvit.training.config import Config
from linvit.training.contract import Batch, Task


class RandomSizes(Callback):
    """Every step has images of one size, which all processes draw alike."""

    def __init__(self, config: Config, task: Task) -> None:
        self.config, self.task = config, task

    def change_batch(self, batch: Batch, step: int) -> Batch:
        draw = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        sizes = self.config.random_sizes
        return self.task.resize(batch, sizes[int(torch.randint(len(sizes), (), generator=draw))])
