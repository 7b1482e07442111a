"""Augmentation on the device: from uint8 pictures to a training batch, as one function of tensors, for every loader.

All random numbers of a step are drawn beforehand, for the whole batch over all processes: one table of uniform numbers,
a few pictures of noise, one row that says how to mix. Each process takes its own rows, so two processes see what one
would have seen. The function itself draws nothing, waits for nothing and has fixed shapes, so it compiles into few
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from linvit.tasks.classify.colours import jitter
from linvit.tasks.classify.geometry import CROP_COLUMNS, Boxes, resample
from linvit.tasks.classify.mixing import ERASE_COLUMNS, NOISES, draw_erased, erase, mix, mixing_table
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing, seed_of
from linvit.tasks.classify.randaugment import RandAugment
from linvit.training.engine.phases import Replayed


class Draws(NamedTuple):
    """The random numbers of one step."""

    uniform: Tensor
    noise: Tensor
    row: Tensor


class Augmenter:
    """Augments batches on a device."""

    def __init__(
        self, augmentation: Augmentation, preprocessing: Preprocessing, classes: int, *, device: torch.device
    ) -> None:
        self.augmentation, self.preprocessing, self.classes, self.device = augmentation, preprocessing, classes, device
        self.policy = RandAugment.parse(augmentation.randaugment) if augmentation.randaugment else None
        self.mean, self.std = statistics(preprocessing, device)
        self.generator = torch.Generator(device)

    @property
    def columns(self) -> list[int]:
        """How many uniform numbers a picture needs for crop, flip, jitter, RandAugment, erasing."""
        return [CROP_COLUMNS, 1, 3, self.policy.columns if self.policy else 0, ERASE_COLUMNS]

    def table(self, steps: int, seed: int, epoch: int, mixed: bool = True) -> Tensor:
        """How the steps of an epoch mix, if they do."""
        table = mixing_table(self.augmentation, steps, seed, epoch)
        if not mixed:
            table[:, 0] = 1
        return send(table, self.device)

    def uniform(
        self,
        batch: int,
        rank: int,
        world: int,
        seed: int,
        epoch: int,
        step: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The uniform numbers of a step, `(batch, columns)`: the same whenever they are asked for, each process its own
        rows of what one would have."""
        generator = generator or torch.Generator(self.device)
        generator.manual_seed(seed_of(seed, epoch, step))
        whole = torch.rand(batch * world, sum(self.columns), generator=generator, device=self.device)
        return whole[rank * batch : (rank + 1) * batch]

    def draw(self, batch: int, rank: int, world: int, seed: int, epoch: int, step: int, row: Tensor) -> Draws:
        """All numbers of a step."""
        uniform = self.uniform(batch, rank, world, seed, epoch, step, self.generator)
        noise = uniform[:0]
        if self.augmentation.erasing:
            shape = (min(NOISES, batch * world), len(self.mean), *self.preprocessing.size)
            noise = torch.randn(*shape, generator=self.generator, device=self.device)
        return Draws(uniform, noise.roll(-rank * batch, 0) if rank else noise, row)

    def __call__(
        self, images: Tensor, labels: Tensor, draws: Draws, boxes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """uint8 pictures and labels to normalised images and targets: labels, or shares of them where images mix. Boxes
        `(batch, 4)` are for pictures that were cropped already, or that have shapes of their own."""
        crop, flip, jitters, policy, erasing = draws.uniform.split(self.columns, dim=1)
        chosen = self.augmentation
        if boxes is None:
            height, width = images.shape[-2:]
            drawn = chosen.draw_boxes(crop, (height, width), self.preprocessing.size)
        else:
            drawn = Boxes(*boxes.unbind(1))
        pixels = normalise(self.vary(images, drawn, flip, jitters, policy), self.mean, self.std)
        if chosen.erasing:
            pixels = erase(pixels, draw_erased(erasing, self.preprocessing.size, chosen.erasing), draws.noise)
        if chosen.mixes:
            return mix(pixels, labels, draws.row, self.classes)
        return pixels, labels

    def vary(self, images: Tensor, boxes: Boxes, flip: Tensor, jitters: Tensor, policy: Tensor) -> Tensor:
        """Crop, flip, and RandAugment or else colour jitter, as timm combines them."""
        chosen, size = self.augmentation, self.preprocessing.size
        draws = self.policy.draw(policy) if self.policy else []
        affines = [self.policy.affine(draw, size) for draw in draws] if self.policy else []
        fill = self.mean.round()
        pixels = resample(images, boxes, flip[:, 0] < chosen.flip, size, affines, fill).round()
        if self.policy:
            for draw in draws:
                pixels = self.policy.colour(pixels, draw)
        elif chosen.colour_jitter:
            pixels = jitter(pixels, jitters, chosen.colour_jitter)
        return pixels


@lru_cache(maxsize=8)
def make_augmenter(
    augmentation: Augmentation, preprocessing: Preprocessing, classes: int, device: torch.device, compile: bool
) -> tuple[Augmenter, Callable[..., tuple[Tensor, Tensor]]]:
    """The augmenter and how to call it. Every step draws its numbers from a seed of its own, so runs can share it:
    what the first compiled or recorded, the others find. Only RandAugment is worth compiling, which passes over the
    pictures some hundred times."""
    augmenter = Augmenter(augmentation, preprocessing, classes, device=device)
    call: Callable[..., tuple[Tensor, Tensor]] = augmenter
    if compile and augmentation.randaugment:
        call = torch.compile(augmenter, dynamic=False)
    if device.type != "cuda":
        return augmenter, call
    recorded = Replayed(
        lambda images, labels, uniform, noise, row, *boxes: call(images, labels, Draws(uniform, noise, row), *boxes)
    )

    def replay(images: Tensor, labels: Tensor, draws: Draws, boxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given = (images, labels, *draws) if boxes is None else (images, labels, *draws, boxes)
        return cast(tuple[Tensor, Tensor], recorded(*given))

    return augmenter, replay


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """From 0 … 255 to what the model expects."""
    return (pixels.float() - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def statistics(preprocessing: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels from 0 to 255."""
    mean, std = (255 * torch.tensor(values, device=device) for values in (preprocessing.mean, preprocessing.std))
    return mean, std
