"""Batches decoded on the way, for sets of any size. Worker processes read the images; on a GPU that can, JPEGs are
decoded there.

Which numbers a picture's crop is drawn from is decided here, not in the workers, so that batches depend neither on how
many there are nor on what they did before: any step can be made again, and a resumed run leaves out the steps before
without decoding them. Streams (WebDataset and the like), whose pictures have no index, repeat themselves only with the
same number of workers, and must be read to be left out.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from linvit.errors import LinvitError, unknown
from linvit.images import Progress, naming_all, quiet, read_all
from linvit.tasks.classify import decoding
from linvit.tasks.classify.augmenting import send
from linvit.tasks.classify.batches import Batches, Pictures
from linvit.tasks.classify.data import Split, Stream
from linvit.tasks.classify.decoding import Chunk, ChunkReader, Request, StreamReader, decode_jpegs, decodes_jpegs
from linvit.tasks.classify.preprocessing import Preprocessing

CHUNK = 64  # images that a worker reads at a time
AHEAD = 4  # chunks that each worker is ahead
DECODERS = ("auto", "cpu", "gpu")


class Streamed(Batches):
    """A BatchSource that reads its images anew in every epoch; the options are those of `Batches`. `decoder` says where
    JPEGs are decoded for training: `auto` takes the GPU where it has a decoder. Evaluation is by timm's transform, on
    the CPU."""

    def __init__(
        self,
        images: Split,
        preprocessing: Preprocessing,
        batch_size: int,
        classes: int,
        *,
        device: str | torch.device = "cpu",
        workers: int = 0,
        decoder: str = "auto",
        progress: Progress = quiet,
        **options: Any,
    ) -> None:
        place = torch.device(device)
        super().__init__(images.name, len(images), preprocessing, batch_size, classes, place, **options)
        if decoder not in DECODERS:
            raise unknown("decoder", decoder, DECODERS)
        self.workers, self.set, self.progress = workers, images, progress
        usable = self.augmentation is not None and decoder != "cpu" and decodes_jpegs(place)
        if decoder == "gpu" and not usable:
            raise LinvitError(f"JPEGs cannot be decoded on {place} here: leave the decoder to auto")
        self.note = f"{images.name} is streamed, its JPEGs decoded on the GPU" if usable else ""
        self.reader = ChunkReader(images, preprocessing, self.augmentation, encoded=usable)
        self.requests = Requests(self)
        self.kept: DataLoader | None = None
        self.reading = False  # somebody holds an epoch that has not ended
        self.complete = False  # what fills no batch was read as well, once: else it would hide what is broken there

    def pictures(self, epoch: int, skip: int) -> Iterator[Pictures]:
        if isinstance(self.set, Stream):
            yield from self.read(epoch, skip)
            return
        with naming_all(self.set.__getitem__, self.order.count, self.progress):
            if not self.complete:
                read_all(self.set.__getitem__, self.order.left_out(epoch))
                self.complete = True
            yield from self.read(epoch, skip)

    def read(self, epoch: int, skip: int) -> Iterator[Pictures]:
        first, self.reading = not self.reading, True
        chunks = iter(self.chunks(epoch, skip, again=not first))
        if isinstance(self.set, Stream):
            chunks = islice(chunks, skip, self.batches if self.augmenter else None)
        steps = self.steps(chunks)
        try:
            yield from one_ahead(steps, torch.cuda.Stream(self.device)) if self.device.type == "cuda" else steps
        finally:
            self.reading = self.reading and not first

    def chunks(self, epoch: int, skip: int, again: bool) -> Iterable[Chunk | LinvitError]:
        """What the workers read. `again` is for a look at another epoch while one is being read: workers that stay
        serve one at a time."""
        if isinstance(self.set, Stream):
            return self.loader(StreamReader(self.reader, self.order.batch, self.order.seed, epoch))
        if again:
            return self.loader(self.reader, sampler=Requests(self, epoch, skip))
        self.requests.epoch, self.requests.skip = epoch, skip
        if self.kept is None:
            self.kept = self.loader(self.reader, sampler=self.requests, persistent_workers=self.workers > 0)
        return self.kept

    def close(self) -> None:
        """End the workers that stay. Others must not be started while they run: those would inherit this loader, and
        complain at their end that its workers are not theirs."""
        end_workers(self.kept)
        self.kept = None

    def loader(self, dataset: Any, **options: Any) -> DataLoader:
        return make_loader(dataset, self.workers, self.device, AHEAD, **options)

    def steps(self, chunks: Iterator[Chunk | LinvitError]) -> Iterator[Pictures]:
        """Steps from their chunks, on the device."""
        parts: list[Chunk] = []
        for chunk in chunks:
            if isinstance(chunk, LinvitError):
                raise chunk
            parts.append(chunk)
            if chunk.last:
                labels = torch.from_numpy(np.concatenate([part.labels for part in parts]))
                boxes = torch.from_numpy(np.concatenate([part.boxes for part in parts]))
                self.check_labels(labels)
                yield self.pixels(parts), send(labels, self.device), send(boxes, self.device)
                parts = []

    def pixels(self, chunks: list[Chunk]) -> Tensor:
        """A step's pictures, at the model's size. The device decodes all it has to at once."""
        files = [file for chunk in chunks for file in chunk.files()]
        pictures = iter(decode_jpegs(files, self.preprocessing.mode, self.device) if files else [])
        parts = []
        for chunk in chunks:
            decoded = chunk.pixels.to(self.device, non_blocking=True)
            places = [place for place, length in enumerate(chunk.lengths) if length]
            if places:
                others = [place for place, length in enumerate(chunk.lengths) if not length]
                decoded = torch.cat([decoded, self.crops(chunk, places, list(islice(pictures, len(places))))])
                decoded = decoded[send(torch.tensor(others + places).argsort(), self.device)]
            parts.append(decoded)
        return torch.cat(parts)

    def crops(self, chunk: Chunk, places: list[int], pictures: list[Tensor | None]) -> Tensor:
        """The crops of pictures that the device has decoded. What it could not, Pillow can, or says what is wrong."""
        whole = [
            self.reader.decode(chunk.indices[place]).to(self.device) if picture is None else picture
            for place, picture in zip(places, pictures, strict=True)
        ]
        filters = [self.reader.filters[place % len(self.reader.filters)] for place in places]
        return decoding.cut_all(whole, torch.from_numpy(chunk.crops)[places], self.preprocessing.size, filters)


class Requests:
    """A sampler: for each step its images, in chunks."""

    def __init__(self, source: Streamed, epoch: int = 0, skip: int = 0) -> None:
        self.source, self.epoch, self.skip = source, epoch, skip

    def __iter__(self) -> Iterator[Request]:
        source, epoch = self.source, self.epoch
        for step, indices in enumerate(source.order.epoch(epoch)[self.skip :], start=self.skip):
            numbers = source.augmenter.uniform(source.order, epoch, step)[0].cpu().numpy() if source.augmenter else None
            for start in range(0, len(indices), CHUNK):
                part, last = slice(start, start + CHUNK), start + CHUNK >= len(indices)
                yield Request(indices[part].tolist(), None if numbers is None else numbers[part], last)


def make_loader(dataset: Any, workers: int, device: torch.device, ahead: int, **options: Any) -> DataLoader:
    """A loader of what a dataset gives by request, as it gives it; each worker is so many requests ahead."""
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=unchanged,
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it would draw from the global one, and change the training
        **options,
    )


def end_workers(loader: DataLoader | None) -> None:
    """End the workers that a loader keeps, if there are any."""
    if loader is not None and loader.num_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def one_ahead(steps: Iterator[Pictures], stream: torch.cuda.Stream | None) -> Iterator[Pictures]:
    """The same steps, each made while the one before is trained on: in a thread, and for a GPU on its own stream."""

    def fetch() -> Pictures | None:
        with torch.cuda.stream(stream):
            found = next(steps, None)
        if stream is not None:
            stream.synchronize()
        return found

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch)
        while (found := coming.result()) is not None:
            coming = thread.submit(fetch)
            for tensor in found:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            yield found


def unchanged(chunk: Any) -> Any:
    return chunk
