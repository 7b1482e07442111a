"""Which images a process sees in which step, from a seed and the epoch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linvit.errors import LinvitError
from linvit.tasks.classify.preprocessing import seed_of


@dataclass(frozen=True)
class Order:
    """Training shuffles, and leaves out what does not fill a batch over all processes. With `repeats` a step has each
    of its images so many times, and an epoch as many steps but fewer images. Evaluation takes every image once and in
    its order, image i in process i mod `world`."""

    count: int
    batch: int  # images a step in this process
    seed: int = 0
    rank: int = 0
    world: int = 1
    training: bool = True
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.training and self.count < self.batch * self.world:
            whole = self.batch * self.world
            raise LinvitError(
                f"the set has {self.count} images, less than one batch of {whole}: give a smaller --set batch_size=…"
            )

    @property
    def batches(self) -> int:
        """Steps per epoch for this process."""
        if self.training:
            return self.count // (self.batch * self.world)
        return -(-len(range(self.rank, self.count, self.world)) // self.batch)

    @property
    def images(self) -> int:
        """Images per epoch over all processes."""
        return self.batches * self.batch * self.world if self.training else self.count

    def epoch(self, epoch: int) -> list[torch.Tensor]:
        """The indices of each step."""
        if not self.training:
            return list(torch.arange(self.rank, self.count, self.world).split(self.batch))
        draw = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        step = self.batch * self.world
        new = -(-step // self.repeats)  # in each step; repeats lie far apart in it, for neighbours are mixed
        whole = torch.randperm(self.count, generator=draw)[: self.batches * new].view(self.batches, new)
        whole = whole.repeat(1, self.repeats)[:, :step]
        return list(whole.reshape(self.batches, self.world, self.batch)[:, self.rank])
