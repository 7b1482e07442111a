"""What every loader of classification shares: which pictures a step has, what is drawn for them, what becomes of them.

A recipe means the same whether a set is resident or streamed. Both take the same images in the same order and draw the
same numbers for them, and one function on the device makes the batch of them: crop, flip, RandAugment or jitter,
normalisation, erasing, mixup and cutmix. A crop is drawn from the whole picture, as the papers do it, in a frame of the
picture's shape that is just large enough for the model (`frames_of`), so that it is the same part of the picture at
whatever size a loader holds it.

What differs is how much of a picture's detail there is to crop from. The resident loader holds every picture at the
model's size; the streamed one cuts the crop out of the original and brings it to the model's size, which is sharper
where pictures are larger. Pictures that have the model's size come out of both with the same bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify.augmenting import Augmenter, Order, make_augmenter, mixing_table, normalise, send, statistics
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing

Pictures = tuple[Tensor, ...]  # uint8 on the device, their labels, their crops where drawn already


class Batches:
    """A BatchSource over `count` images. Without an augmentation it is for evaluation: every image once, in order;
    `place` is what else an `Order` has. What a loader adds is `pictures`."""

    augmenter: Augmenter | None = None

    def __init__(
        self,
        name: str,
        count: int,
        preprocessing: Preprocessing,
        batch_size: int,
        classes: int,
        device: torch.device,
        *,
        augmentation: Augmentation | None = None,
        compile: bool = False,
        **place: Any,
    ) -> None:
        if augmentation is not None and augmentation.mixes and batch_size % 2:
            odd = f"{batch_size} images a process is odd, set another batch_size"
            raise LinvitError(f"mixup and cutmix pair images: {odd}")
        self.name, self.preprocessing, self.classes, self.device = name, preprocessing, classes, device
        self.augmentation = augmentation
        self.order = Order(count, batch_size, training=augmentation is not None, **place)
        self.batches, self.images = self.order.batches, self.order.images
        if augmentation is not None:
            self.augmenter, self.augment = make_augmenter(augmentation, preprocessing, classes, device, compile)
        self.mean, self.std = statistics(preprocessing, device)

    def pictures(self, epoch: int, skip: int) -> Iterator[Pictures]:
        """What the steps of an epoch are made from, from step `skip` on."""
        raise NotImplementedError

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        if self.augmentation is None or self.augmenter is None:
            for pictures, labels, *_ in self.pictures(epoch, skip):
                yield normalise(pictures, self.mean, self.std), labels
            return
        table = send(mixing_table(self.augmentation, self.batches, self.order.seed, epoch, mixed), self.device)
        for step, (pictures, labels, *boxes) in enumerate(self.pictures(epoch, skip), start=skip):
            uniform, noise = self.augmenter.draw(self.order, epoch, step)
            yield self.augment(pictures, labels, uniform, noise, table[step], *boxes)

    def check_labels(self, labels: Tensor) -> None:
        """Whether the model has an output for every label."""
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise LinvitError(f"{self.name} has label {low if low < 0 else high}, the model {self.classes} outputs")
