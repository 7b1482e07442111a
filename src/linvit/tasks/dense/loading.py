"""Batches for detection and segmentation, read and transformed by worker processes.

What is drawn for an image follows from the seed, the epoch and the image alone, so that batches depend neither on the
number of workers nor on what they did before: a resumed run leaves out the steps before without reading them.

A batch travels from its worker as a few tensors, however many objects it has: pictures as uint8, and of each kind of
target one flat tensor with the shapes of its parts. On the device they are normalised and padded, and taken apart.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linvit.errors import LinvitError
from linvit.images import Progress, naming_all, quiet, read_all
from linvit.models.dense import IGNORED, Target
from linvit.tasks.classify.augmenting import Order, normalise
from linvit.tasks.classify.preprocessing import seed_of
from linvit.tasks.classify.streaming import end_workers, make_loader
from linvit.tasks.dense.colours import vary
from linvit.tasks.dense.samples import Samples
from linvit.tasks.dense.transforms import EvalTransform, TrainTransform, TransformSettings

MULTIPLE = 32  # padded sides are a multiple of the coarsest stride
ON_HOST = ("size",)  # what only Python reads, for which nobody should wait for the device
AHEAD = 2  # batches that each worker is ahead

Batch = tuple[Tensor, list[Target]]
View = tuple[Tensor, Target]  # a transformed image and its target


class Request(NamedTuple):
    epoch: int
    indices: list[int]


class Packed(NamedTuple):
    """A batch as it travels."""

    images: Tensor  # uint8, padded
    values: dict[str, Tensor]  # all values of a kind, one image's after the other's
    shapes: dict[str, list[tuple[int, ...]]]


class DenseSource:
    """A BatchSource over samples. In training images are shuffled and augmented, and what does not fill a batch over
    all processes is left out; else every image comes once and in its order, image i in process i mod `world`.

    Batches are images `(batch, 3, height, width)`, normalised and padded with zeros at the right and the bottom, and a
    target for each image: see `linvit.models.dense.DenseModel`. Labels and masks are padded as the images are, with 255
    and 0. In evaluation a target has `size`, `original` (height and width), `image_id` and the truths in original
    pixels: what `Sample` has."""

    def __init__(
        self,
        samples: Samples,
        settings: TransformSettings,
        batch_size: int,
        *,
        training: bool,
        device: str | torch.device = "cpu",
        workers: int = 0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        progress: Progress = quiet,
    ) -> None:
        self.progress = progress
        self.samples, self.device, self.workers = samples, torch.device(device), workers
        self.statistics = statistics_of(settings, self.device)
        self.order = Order(len(samples), batch_size, seed, rank, world, training)
        self.batches, self.images = self.order.batches, self.order.images
        self.reader = Reader(samples, settings, training, seed)
        self.requests = Requests(self.order)
        self.kept: DataLoader | None = None
        self.reading = False  # somebody holds an epoch that has not ended
        self.complete = False  # what fills no batch was read as well, once: else it would hide what is broken there

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[Batch]:
        first, self.reading = not self.reading, True
        try:
            with naming_all(self.samples.read, len(self.samples), self.progress):
                if not self.complete:
                    read_all(self.samples.read, self.order.left_out(epoch))
                    self.complete = True
                for packed in self.loader(epoch, skip) if first else self.another(Requests(self.order, epoch, skip)):
                    if isinstance(packed, LinvitError):
                        raise packed
                    yield unpack(packed, self.statistics)
        finally:
            self.reading = self.reading and not first

    def loader(self, epoch: int, skip: int) -> DataLoader:
        """The loader whose workers stay from epoch to epoch; they serve one at a time."""
        self.requests.epoch, self.requests.skip = epoch, skip
        if self.kept is None:
            self.kept = self.another(self.requests, persistent_workers=self.workers > 0)
        return self.kept

    def another(self, requests: "Requests", **options: Any) -> DataLoader:
        return make_loader(self.reader, self.workers, self.device, AHEAD, sampler=requests, **options)

    def close(self) -> None:
        """End the workers that stay."""
        end_workers(self.kept)
        self.kept = None


class Requests:
    """A sampler: for each step its images."""

    def __init__(self, order: Order, epoch: int = 0, skip: int = 0) -> None:
        self.order, self.epoch, self.skip = order, epoch, skip

    def __iter__(self) -> Iterator[Request]:
        epoch = self.epoch
        for indices in self.order.epoch(epoch)[self.skip :]:
            yield Request(epoch, indices.tolist())


class Reader(Dataset):
    """Reads batches by request. An error travels as a value: raised in a worker it would end in a traceback."""

    def __init__(self, samples: Samples, settings: TransformSettings, training: bool, seed: int) -> None:
        self.samples, self.seed, self.canvas = samples, seed, settings.canvas(training)
        self.transform = TrainTransform(settings) if training else EvalTransform(settings)
        self.padded = training

    def __getitem__(self, request: Request) -> Packed | LinvitError:
        try:
            return pack([self.view(request.epoch, index) for index in request.indices], self.canvas, self.padded)
        except LinvitError as error:
            return error

    def view(self, epoch: int, index: int) -> View:
        with torch.random.fork_rng(devices=[]):  # of the CPU alone: the training keeps its random numbers
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
            return self.transform(self.samples.read(index))


def pack(views: Sequence[View], canvas: int, padded: bool) -> Packed:
    """Images, and targets that are `padded` with them, on one canvas; where it is 0, the smallest for all."""
    images = [image for image, _ in views]
    height, width = (
        canvas or -(-max(image.shape[side] for image in images) // MULTIPLE) * MULTIPLE for side in (-2, -1)
    )
    batch = torch.zeros(len(images), images[0].shape[0], height, width, dtype=torch.uint8)
    for place, image in enumerate(images):
        batch[place, :, : image.shape[-2], : image.shape[-1]] = image
    values, shapes = {}, {}
    for name in views[0][1]:
        found = [target[name] for _, target in views]
        if name == "labels" and found[0].ndim == 2:
            found = [one.byte() for one in found]
        if padded and found[0].dtype == torch.uint8:  # maps of labels, and masks
            found = [on_canvas(one, height, width, IGNORED if name == "labels" else 0) for one in found]
        values[name] = torch.cat([one.flatten() for one in found])
        shapes[name] = [tuple(one.shape) for one in found]
    return Packed(batch, values, shapes)


def on_canvas(maps: Tensor, height: int, width: int, value: int) -> Tensor:
    """Maps `(…, height, width)` with a value to the right and below."""
    whole = maps.new_full((*maps.shape[:-2], height, width), value)
    whole[..., : maps.shape[-2], : maps.shape[-1]] = maps
    return whole


def unpack(packed: Packed, statistics: tuple[Tensor, Tensor]) -> Batch:
    """The batch on the device that has the mean and the standard deviation of pixels. Truths of an evaluation stay on
    the host, where they are judged by: reading them back, tensor by tensor, would wait for the device each time."""
    device = statistics[0].device
    images = packed.images.to(device, non_blocking=True)
    sizes = packed.values["size"].to(device, non_blocking=True).view(-1, 2, 1, 1)
    rows, columns = (torch.arange(side, device=device) for side in images.shape[-2:])
    inside = (rows[:, None] < sizes[:, 0]) & (columns < sizes[:, 1])
    if "colours" in packed.values:
        images = vary(images, packed.values["colours"].to(device, non_blocking=True).view(len(images), -1), inside)
    normalised = normalise(images, *statistics) * inside[:, None]
    targets: list[Target] = [{} for _ in range(len(images))]
    judged = "original" in packed.values
    for name, values in packed.values.items():
        if name == "colours":
            continue
        shapes = packed.shapes[name]
        values = values if judged or name in ON_HOST else values.to(device, non_blocking=True)
        parts = values.split([torch.Size(shape).numel() for shape in shapes])
        for target, part, shape in zip(targets, parts, shapes, strict=True):
            target[name] = (part.long() if name == "labels" else part).view(shape)
    return normalised, targets


def statistics_of(settings: TransformSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels from 0 to 255."""
    return 255 * torch.tensor(settings.mean, device=device), 255 * torch.tensor(settings.std, device=device)


def batch_of(images: Sequence[Tensor], settings: TransformSettings, device: str | torch.device = "cpu") -> Batch:
    """Images of which nothing is known, uint8 `(3, height, width)` of any sizes, as a batch for evaluation."""
    transform = EvalTransform(settings)
    views = [transform.image(image) for image in images]
    return unpack(pack(views, settings.canvas(False), False), statistics_of(settings, torch.device(device)))
