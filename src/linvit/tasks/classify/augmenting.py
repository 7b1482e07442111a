"""Augmentation on the device: from uint8 pictures to a training batch, as one function of tensors, for every loader.

All random numbers of a step are drawn beforehand, for the whole batch over all processes: one table of uniform numbers,
a few pictures of noise, one row that says how to mix. Each process takes its own rows, so two processes see what one
would have seen. The function itself draws nothing, waits for nothing and has fixed shapes, so it compiles into few
kernels.

Random erasing, mixup and cutmix are drawn as timm draws them. timm's own classes draw from global generators, and erase
picture by picture; these take their random numbers as arguments and work on the whole batch at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.tasks.classify.preprocessing import CROP_COLUMNS, Augmentation, Preprocessing, seed_of
from linvit.tasks.classify.randaugment import Affine, RandAugment, jitter
from linvit.training.engine.phases import Replayed

ERASE_ATTEMPTS = 3
ERASE_COLUMNS = 2 * ERASE_ATTEMPTS + 3
ERASE_AREA, ERASE_ASPECT = (0.02, 1 / 3), 0.3
NOISES = 64  # pictures of noise drawn for each step; more pictures share them


@dataclass(frozen=True)
class Order:
    """Which images a process sees in which step, from a seed and the epoch alone.

    Training shuffles, and leaves out what does not fill a batch over all processes. With `repeats` a step has each
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
        whole = self.batch * self.world
        if self.training and self.count < whole:
            few = f"the set has {self.count} images, less than one batch of {whole}"
            raise LinvitError(f"{few}: give a smaller --set batch_size=…")

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
        step = self.batch * self.world
        new = -(-step // self.repeats)  # in each step; repeats lie far apart in it, for neighbours are mixed
        whole = self.shuffled(epoch)[: self.batches * new].view(self.batches, new)
        whole = whole.repeat(1, self.repeats)[:, :step]
        return list(whole.reshape(self.batches, self.world, self.batch)[:, self.rank])

    def shuffled(self, epoch: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.count, generator=draw)

    def left_out(self, epoch: int) -> list[int]:
        """Of the images that fill no batch those that are for this process to look at."""
        return self.shuffled(epoch)[self.images :][self.rank :: self.world].tolist() if self.training else []


class Augmenter:
    """Augments batches on a device."""

    def __init__(
        self, augmentation: Augmentation, preprocessing: Preprocessing, classes: int, device: torch.device
    ) -> None:
        self.augmentation, self.preprocessing, self.classes, self.device = augmentation, preprocessing, classes, device
        self.policy = RandAugment.parse(augmentation.randaugment or "rand-n0")
        self.mean, self.std = statistics(preprocessing, device)
        # How many uniform numbers a picture needs for crop, flip, jitter, RandAugment, erasing.
        self.columns = [CROP_COLUMNS, 1, 3, self.policy.columns, ERASE_COLUMNS]

    def uniform(self, order: Order, epoch: int, step: int) -> tuple[Tensor, torch.Generator]:
        """The uniform numbers of a step, `(batch, columns)`, and where further ones come from: the same whenever they
        are asked for, each process its own rows of what one would have."""
        generator = torch.Generator(self.device).manual_seed(seed_of(order.seed, epoch, step))
        whole = torch.rand(order.batch * order.world, sum(self.columns), generator=generator, device=self.device)
        return whole[order.rank * order.batch :][: order.batch], generator

    def draw(self, order: Order, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """The uniform numbers of a step and its noise."""
        uniform, generator = self.uniform(order, epoch, step)
        if not self.augmentation.erasing:
            return uniform, uniform[:0]
        shape = (min(NOISES, order.batch * order.world), len(self.mean), *self.preprocessing.size)
        noise = torch.randn(*shape, generator=generator, device=self.device)
        return uniform, noise.roll(-order.rank * order.batch, 0) if order.rank else noise

    def __call__(
        self, images: Tensor, labels: Tensor, uniform: Tensor, noise: Tensor, row: Tensor, boxes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """uint8 pictures and labels to normalised images and targets: labels, or shares of them where images mix.
        Pictures are cropped and flipped, and varied by RandAugment or else colour jitter. Boxes `(batch, 4)` are for
        those that were cropped already, or that have shapes of their own."""
        crop, flip, jitters, policy, erasing = uniform.split(self.columns, dim=1)
        chosen, size = self.augmentation, self.preprocessing.size
        if boxes is None:
            boxes = chosen.draw_boxes(crop, (images.shape[-2], images.shape[-1]), size)
        layers = self.policy.draw(policy)
        affines = [self.policy.affine(layer, size) for layer in layers]
        pixels = resample(images, boxes, flip[:, 0] < chosen.flip, size, affines, self.mean.round()).round()
        for layer in layers:
            pixels = self.policy.colour(pixels, layer)
        if chosen.colour_jitter and not layers:  # not both, as in timm
            pixels = jitter(pixels, jitters, chosen.colour_jitter)
        pixels = normalise(pixels, self.mean, self.std)
        if chosen.erasing:
            pixels = erase(pixels, draw_erased(erasing, size, chosen.erasing), noise)
        return mix(pixels, labels, row, self.classes) if chosen.mixes else (pixels, labels)


@lru_cache(maxsize=8)
def make_augmenter(
    augmentation: Augmentation, preprocessing: Preprocessing, classes: int, device: torch.device, compile: bool
) -> tuple[Augmenter, Callable[..., Any]]:
    """The augmenter and how to call it. Every step draws its numbers from a seed of its own, so runs can share it:
    what the first compiled or recorded, the others find. Only RandAugment is worth compiling, which passes over the
    pictures some hundred times."""
    augmenter = Augmenter(augmentation, preprocessing, classes, device)
    call: Callable[..., Any] = augmenter
    if compile and augmentation.randaugment:
        call = torch.compile(augmenter, dynamic=False)
    return augmenter, Replayed(call) if device.type == "cuda" else call


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


def resample(
    images: Tensor,
    boxes: Tensor,
    flip: Tensor,
    size: tuple[int, int],
    affines: Sequence[Affine] = (),
    fill: Tensor | None = None,
) -> Tensor:
    """Crop, then flip, then the affine maps in their order, onto `size`, in one resampling. What an affine map reads
    from outside its frame gets the fill colour `(channels,)`.

    Every map is from a place in the output to the place it is read from, in pixels, so maps compose before any pixel is
    touched: a picture is interpolated once however many maps there are."""
    height, width = size
    x = (torch.arange(width, device=images.device) + 0.5).view(1, 1, width)
    y = (torch.arange(height, device=images.device) + 0.5).view(1, height, 1)
    inside: Tensor | None = None
    for affine in reversed(affines):
        a, b, c, d, e, f = (value.view(-1, 1, 1) for value in affine)
        x, y = a * x + b * y + c, d * x + e * y + f
        here = (x >= 0) & (x <= width) & (y >= 0) & (y <= height)
        inside = here if inside is None else inside & here
    x = torch.where(flip.view(-1, 1, 1), width - x, x)
    top, left, tall, wide = boxes.view(-1, 4, 1, 1).unbind(1)
    # Half a pixel at the rim of a crop would read across it: a crop knows nothing of what is beyond.
    x = (x * (wide / width)).clamp(min=0.5).minimum(wide - 0.5) + left
    y = (y * (tall / height)).clamp(min=0.5).minimum(tall - 0.5) + top
    x, y = 2 * x / images.shape[-1] - 1, 2 * y / images.shape[-2] - 1
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)
    out = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return out if inside is None or fill is None else torch.where(inside[:, None], out, fill.view(1, -1, 1, 1))


def draw_erased(u: Tensor, size: tuple[int, int], prob: float) -> Tensor:
    """The erased pixels `(batch, height, width)` from uniform numbers `(batch, ERASE_COLUMNS)`.

    A rectangle with 2 % to a third of the area; the first attempt that fits counts, and where none does, nothing."""
    height, width = size
    n = ERASE_ATTEMPTS
    area = height * width * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * u[:, :n])
    aspect = torch.exp(math.log(ERASE_ASPECT) * (1 - 2 * u[:, n : 2 * n]))
    heights, widths = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (heights < height) & (widths < width)
    first = fits & (fits.cumsum(1) == 1) & (u[:, -1:] < prob)
    tall, wide = (heights * first).sum(1), (widths * first).sum(1)
    top, left = (u[:, -3] * (height - tall + 1)).floor(), (u[:, -2] * (width - wide + 1)).floor()
    return inside(top, top + tall, left, left + wide, size)


def inside(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels of boxes, `(boxes, height, width)`."""
    rows = torch.arange(size[0], device=top.device).view(1, -1, 1)
    columns = torch.arange(size[1], device=top.device).view(1, 1, -1)
    top, bottom, left, right = (value.view(-1, 1, 1) for value in (top, bottom, left, right))
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def erase(images: Tensor, erased: Tensor, noise: Tensor) -> Tensor:
    """Put noise, `(pictures, channels, height, width)`, in the place of the erased pixels."""
    return torch.where(erased[:, None], noise[torch.arange(len(images), device=images.device) % len(noise)], images)


def mixing_table(augmentation: Augmentation, steps: int, seed: int, epoch: int, mixed: bool = True) -> Tensor:
    """How each step of an epoch mixes, if they do, `(steps, 4)`: λ, whether by cutmix, and the middle of the box.

    λ = 1 leaves a batch as it is. Drawn on the host, where there is a beta distribution that takes a seed."""
    draw = np.random.default_rng(seed_of(seed, epoch, 1))
    cut = np.full(steps, augmentation.cutmix > 0)
    if augmentation.mixup > 0 and augmentation.cutmix > 0:
        cut = draw.random(steps) < augmentation.mixup_switch
    mixup, cutmix = (draw.beta(alpha or 1, alpha or 1, steps) for alpha in (augmentation.mixup, augmentation.cutmix))
    share = np.where(cut, cutmix, mixup)
    share[(draw.random(steps) >= augmentation.mixup_prob) | (not mixed)] = 1
    table = np.stack([share, cut, draw.random(steps), draw.random(steps)], axis=1)
    return torch.from_numpy(table.astype(np.float32))


def mix(images: Tensor, labels: Tensor, row: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each picture with its neighbour (0 with 1, 2 with 3, …), by a row of the table, and the labels likewise.

    timm pairs the first picture with the last; in a shuffled batch that is the same, and neighbours stay together when
    a batch is shared out to processes.
    """
    height, width = images.shape[-2:]
    share, cut, down, across = row.unbind()
    cut = cut > 0.5
    side = (1 - share).sqrt()
    tall, wide = (height * side).floor(), (width * side).floor()
    y, x = (down * height).floor(), (across * width).floor()
    top, bottom = (y - (tall / 2).floor()).clamp(0, height), (y + ((tall + 1) / 2).floor()).clamp(0, height)
    left, right = (x - (wide / 2).floor()).clamp(0, width), (x + ((wide + 1) / 2).floor()).clamp(0, width)
    box = inside(top, bottom, left, right, (height, width))[0]
    weight = torch.where(cut, 1 - box.float(), share)  # of the picture itself, for each pixel
    images = weight * images + (1 - weight) * neighbours(images)
    own = torch.where(cut, weight.mean(), share)
    targets = F.one_hot(labels, classes).float()
    return images, own * targets + (1 - own) * neighbours(targets)


def neighbours(values: Tensor) -> Tensor:
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
