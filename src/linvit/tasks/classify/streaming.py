"""Batches decoded on the way, for sets of any size: timm's transforms in worker processes, the rest on the device.

timm's loader draws from the workers' generators, so what a picture looks like depends on how many workers there are and
what they did before. Here every picture carries its own seed, made of the run's seed, the epoch and its place: any step
can be made again, and a resumed run leaves out the steps before without decoding them. Streams (WebDataset and the
like), which have no places, repeat themselves only with the same number of workers, and must be read to be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from linvit.conversion.calibration import eight_bits
from linvit.errors import LinvitError
from linvit.tasks.classify.augmenting import Augmenter, check_batch, normalise
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.order import Order
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing, seed_of, seeded, seeds_of


class Streamed:
    """A BatchSource. Without an augmentation it is for evaluation: every image once, in order."""

    def __init__(
        self,
        images: Images | Stream,
        preprocessing: Preprocessing,
        batch_size: int,
        classes: int,
        *,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        device: str | torch.device = "cpu",
        workers: int = 0,
    ) -> None:
        check_batch(batch_size, augmentation)
        self.device, self.classes, self.workers = torch.device(device), classes, workers
        self.preprocessing, self.set = preprocessing, images
        training = augmentation is not None
        self.order = Order(len(images), batch_size, seed, rank, world, training, repeats)
        self.batches, self.images = self.order.batches, self.order.images
        self.augmenter = None
        transform = preprocessing.evaluation()
        if augmentation is not None:
            self.augmenter = Augmenter(augmentation, preprocessing, classes, device=self.device, resize=False)
            transform = augmentation.transform(preprocessing, preprocessing.size)
        self.transformed = Transformed(images, transform, preprocessing.mode)
        self.mean = 255 * torch.tensor(preprocessing.mean, device=self.device)
        self.std = 255 * torch.tensor(preprocessing.std, device=self.device)
        self.steps = Steps(self.order)
        self.kept: DataLoader | None = None
        self.reading = False  # somebody holds an epoch that has not ended

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        first, self.reading = not self.reading, True
        try:
            yield from self.varied(epoch, skip, mixed, again=not first)
        finally:
            self.reading = self.reading and not first

    def varied(self, epoch: int, skip: int, mixed: bool, again: bool) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order
        table = self.augmenter.table(order.batches, order.seed, epoch, mixed) if self.augmenter else None
        for step, found in enumerate(self.decoded(epoch, skip, again), start=skip):
            if isinstance(found, LinvitError):
                raise found
            pixels, labels = found
            self.check(labels)
            pixels = pixels.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            if self.augmenter is None or table is None:
                yield normalise(pixels, self.mean, self.std), labels
                continue
            draws = self.augmenter.draw(len(labels), order.rank, order.world, order.seed, epoch, step, table[step])
            yield self.augmenter(pixels, labels, draws)

    def decoded(self, epoch: int, skip: int, again: bool) -> Iterator[Any]:
        """uint8 batches, or the error that stopped them. `again` is for a look at another epoch while one is being
        read: workers that stay serve one at a time."""
        if isinstance(self.set, Stream):
            training = self.augmenter is not None
            stream = self.set.open(training=training, batch_size=self.order.batch, seed=self.order.seed)
            read = Read(stream, self.transformed, seed_of(self.order.seed, epoch), epoch)
            draw = torch.Generator().manual_seed(seed_of(self.order.seed, epoch))
            loader = self.loader(read, generator=draw, batch_size=self.order.batch, drop_last=training)
            return islice(iter(loader), skip, self.batches if training else None)
        if again:
            steps = Steps(self.order, epoch, skip)
            return iter(self.loader(self.transformed, generator=torch.Generator(), batch_sampler=steps))
        self.steps.epoch, self.steps.skip = epoch, skip
        if self.kept is None:
            generator = torch.Generator()  # else the loader would draw from the global one, and change the training
            keep = self.workers > 0
            self.kept = self.loader(
                self.transformed, generator=generator, batch_sampler=self.steps, persistent_workers=keep
            )
        return iter(self.kept)

    def loader(self, dataset: Any, **options: Any) -> DataLoader:
        pinned = self.device.type == "cuda"
        return DataLoader(dataset, num_workers=self.workers, collate_fn=collate, pin_memory=pinned, **options)

    def check(self, labels: Tensor) -> None:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            outside = low if low < 0 else high
            raise LinvitError(f"{self.set.name} has label {outside}, the model {self.classes} outputs")


class Steps:
    """A batch sampler: for each step its images, each with its seed."""

    def __init__(self, order: Order, epoch: int = 0, skip: int = 0) -> None:
        self.order, self.epoch, self.skip = order, epoch, skip

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, epoch = self.order, self.epoch
        whole = order.batch * order.world
        for step, indices in enumerate(order.epoch(epoch)[self.skip :], start=self.skip):
            first = order.rank * order.batch
            seeds = seeds_of(whole, order.seed, epoch, step)[first : first + len(indices)]
            yield list(zip(indices.tolist(), seeds, strict=True))

    def __len__(self) -> int:
        return self.order.batches - self.skip


class Transformed(Dataset):
    """Decoded and transformed pictures. An error travels as a value: raised in a worker it would end in a traceback."""

    def __init__(self, images: Any, transform: Any, mode: str) -> None:
        self.images, self.transform, self.mode = images, transform, mode

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int] | LinvitError:
        index, seed = item
        try:
            picture, label = self.images[index]
        except LinvitError as error:
            return error
        return self.apply(picture, seed), label

    def apply(self, picture: Image.Image, seed: int) -> Tensor:
        with seeded(seed):
            return self.transform(eight_bits(picture).convert(self.mode))


class Read(IterableDataset):
    """A stream with a seed for each picture, made of its place in what this worker reads."""

    def __init__(self, stream: Any, transformed: Transformed, seed: int, epoch: int) -> None:
        self.stream, self.transformed, self.seed = stream, transformed, seed
        stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        for place, (picture, label) in enumerate(self.stream):
            yield self.transformed.apply(picture, seed_of(self.seed, number, place)), int(label)


def collate(samples: list[Any]) -> tuple[Tensor, Tensor] | LinvitError:
    """A batch, or the first error in it."""
    for sample in samples:
        if isinstance(sample, LinvitError):
            return sample
    return torch.stack([pixels for pixels, _ in samples]), torch.tensor([label for _, label in samples])
