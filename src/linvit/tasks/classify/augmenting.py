"""The device's share of the augmentation: from stored uint8 pictures to a training batch, as one function of tensors.

All random numbers of a step are drawn beforehand, for the whole batch over all processes: one table of uniform numbers,
a few pictures of noise, one row that says how to mix. Each process takes its own rows, so two processes see what one
would have seen. The function itself draws nothing, waits for nothing and has fixed shapes, so it compiles into few
kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify.colours import jitter
from linvit.tasks.classify.geometry import CROP_COLUMNS, draw_boxes, resample
from linvit.tasks.classify.mixing import ERASE_COLUMNS, NOISES, draw_erased, erase, mix, mixing_table
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing, seed_of
from linvit.tasks.classify.randaugment import RandAugment


class Draws(NamedTuple):
    """The random numbers of one step."""

    uniform: Tensor
    noise: Tensor
    row: Tensor


class Augmenter:
    """Augments batches on a device. `resize` is whether pictures still have to be cropped and coloured, or come from
    timm's transforms, which leaves erasing and mixing."""

    def __init__(
        self,
        augmentation: Augmentation,
        preprocessing: Preprocessing,
        classes: int,
        *,
        device: torch.device,
        resize: bool = True,
    ) -> None:
        self.augmentation, self.preprocessing, self.classes = augmentation, preprocessing, classes
        self.device, self.resize = device, resize
        self.policy = RandAugment.parse(augmentation.randaugment) if resize and augmentation.randaugment else None
        self.mean = 255 * torch.tensor(preprocessing.mean, device=device)
        self.std = 255 * torch.tensor(preprocessing.std, device=device)
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

    def draw(self, batch: int, rank: int, world: int, seed: int, epoch: int, step: int, row: Tensor) -> Draws:
        """The numbers of a step: the same whenever it is asked for, and each process its own part of them."""
        self.generator.manual_seed(seed_of(seed, epoch, step))
        uniform = torch.rand(batch * world, sum(self.columns), generator=self.generator, device=self.device)
        shape = (min(NOISES, batch * world), len(self.mean), *self.preprocessing.size)
        noise = uniform[:0]
        if self.augmentation.erasing:
            noise = torch.randn(*shape, generator=self.generator, device=self.device)
        first = rank * batch
        return Draws(uniform[first : first + batch], noise.roll(-first, 0) if first else noise, row)

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """uint8 pictures and labels to normalised images and targets: labels, or shares of them where images mix."""
        crop, flip, jitters, policy, erasing = draws.uniform.split(self.columns, dim=1)
        chosen = self.augmentation
        pixels = self.vary(images, crop, flip, jitters, policy) if self.resize else images.float()
        pixels = normalise(pixels, self.mean, self.std)
        if chosen.erasing:
            pixels = erase(pixels, draw_erased(erasing, self.preprocessing.size, chosen.erasing), draws.noise)
        if chosen.mixes:
            return mix(pixels, labels, draws.row, self.classes)
        return pixels, labels

    def vary(self, images: Tensor, crop: Tensor, flip: Tensor, jitters: Tensor, policy: Tensor) -> Tensor:
        """Crop, flip, and RandAugment or else colour jitter, as timm combines them."""
        chosen, size = self.augmentation, self.preprocessing.size
        height, width = images.shape[-2:]
        boxes = draw_boxes(crop, (height, width), chosen.crop_scale, chosen.crop_ratio)
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


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """From 0 … 255 to what the model expects."""
    return (pixels.float() - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def check_batch(batch: int, augmentation: Augmentation | None) -> None:
    """Pictures are mixed in pairs."""
    if augmentation is not None and augmentation.mixes and batch % 2:
        raise LinvitError(f"mixup and cutmix pair images: {batch} images a process is odd, set another batch_size")
