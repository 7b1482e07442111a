"""From image files to uint8 pictures: what the streamed loader's workers do, and JPEGs decoded on the GPU.

A worker looks at the headers, draws the crops and cuts them out. JPEGs that the GPU is to decode it only reads: their
bytes travel, and the crop is cut out there. Those are the plain ones: Pillow decodes what has other colours, other
formats or no end, and says which file cannot be read.

Pillow and the GPU differ by a few grey levels, since each smooths JPEG's colours in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from linvit.errors import LinvitError
from linvit.tasks.classify.cutting import channels_first, cut, in_mode
from linvit.tasks.classify.data import Images, Stream
from linvit.tasks.classify.geometry import CROP_COLUMNS, frames_of
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing, seed_of

END = b"\xff\xd9"  # of a JPEG, perhaps with a little after it
AFTER_END = 32


class Request(NamedTuple):
    """Some images of a step, and the uniform numbers for their crops in training."""

    indices: list[int]
    numbers: np.ndarray | None
    last: bool


class Chunk(NamedTuple):
    """What became of a request; small things are arrays, which travel without shared memory."""

    labels: np.ndarray
    boxes: np.ndarray  # crops on the model's size, `(images, 4)`
    pixels: Tensor  # pictures of the model's size: those that are decoded
    encoded: Tensor  # the bytes of the others
    lengths: list[int]  # of each, 0 where a picture is decoded
    crops: np.ndarray  # in the pictures' own pixels
    indices: list[int]
    last: bool  # of its step

    def files(self) -> list[Tensor]:
        """The encoded pictures, one by one."""
        lengths = [length for length in self.lengths if length]
        return list(self.encoded.split(lengths)) if lengths else []


class ChunkReader(Dataset):
    """Reads images by request. An error travels as a value: raised in a worker it would end in a traceback."""

    def __init__(
        self,
        images: Images | Stream,
        preprocessing: Preprocessing,
        augmentation: Augmentation | None,
        *,
        encoded: bool = False,
    ) -> None:
        self.images, self.preprocessing, self.augmentation, self.encoded = images, preprocessing, augmentation, encoded
        self.filters = augmentation.filters(preprocessing) if augmentation else ()
        self.evaluate = preprocessing.evaluation()

    def __getitem__(self, request: Request) -> Chunk | LinvitError:
        assert isinstance(self.images, Images)
        try:
            pictures, labels = zip(*(self.images.open(index) for index in request.indices), strict=True)
            return self.read(pictures, labels, request)
        except LinvitError as error:
            return error

    def read(self, pictures: Sequence[Image.Image], labels: Sequence[int], request: Request) -> Chunk:
        """A chunk from pictures, of which only the headers may have been read."""
        height, width = size = self.preprocessing.size
        mode = self.preprocessing.mode
        boxes = crops = np.tile(np.array([0, 0, height, width], np.float32), (len(pictures), 1))
        if self.augmentation is not None:
            crops = self.draw(pictures, torch.from_numpy(request.numbers)).numpy()
        decoded, files = [], []
        for place, picture in enumerate(pictures):
            data = b""
            with self.naming(request.indices, place):
                if self.augmentation is None:
                    decoded.append(self.evaluate(in_mode(picture, mode)))
                elif picture.size == (width, height):
                    decoded.append(channels_first(in_mode(picture, mode)))
                    boxes[place] = crops[place]
                elif not self.encoded or not (data := plain_jpeg(picture, mode)):
                    how = self.filters[place % len(self.filters)]
                    decoded.append(cut(picture, crops[place].tolist(), size, mode, how))
            files.append(data)
        pixels = torch.stack(decoded) if decoded else torch.empty(0, len(self.preprocessing.mean), *size).byte()
        encoded = torch.frombuffer(bytearray(b"".join(files)) or bytearray(1), dtype=torch.uint8)
        return Chunk(
            np.array(labels),
            boxes,
            pixels,
            encoded,
            [len(file) for file in files],
            crops,
            request.indices,
            request.last,
        )

    def draw(self, pictures: Sequence[Image.Image], numbers: Tensor) -> Tensor:
        """Crops of pictures, in their own pixels."""
        assert self.augmentation is not None
        shapes = torch.tensor([(picture.height, picture.width) for picture in pictures]).float()
        frames = frames_of(shapes, self.preprocessing.size)
        boxes = self.augmentation.draw_boxes(numbers, frames, self.preprocessing.size)
        return torch.stack(boxes.scaled(shapes / frames), dim=1)

    def decode(self, index: int) -> Tensor:
        """One whole picture, by Pillow."""
        assert isinstance(self.images, Images)
        return channels_first(in_mode(self.images[index][0], self.preprocessing.mode))

    def naming(self, indices: list[int], place: int) -> AbstractContextManager[None]:
        return self.images.naming(indices[place]) if isinstance(self.images, Images) else nullcontext()


class StreamReader(IterableDataset):
    """An epoch of a stream, a step at a time. Crops are drawn by a picture's place in what its worker reads."""

    def __init__(self, reader: ChunkReader, batch: int, seed: int, epoch: int) -> None:
        assert isinstance(reader.images, Stream)
        self.reader, self.batch, self.seed = reader, batch, seed_of(seed, epoch)
        self.training = reader.augmentation is not None
        self.stream = reader.images.open(training=self.training, batch_size=batch, seed=seed)
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        pictures: list[Image.Image] = []
        labels: list[int] = []
        numbers: list[Tensor] = []
        for place, (picture, label) in enumerate(self.stream):
            pictures.append(picture)
            labels.append(int(label))
            draw = torch.Generator().manual_seed(seed_of(self.seed, number, place))
            numbers.append(torch.rand(CROP_COLUMNS, generator=draw))
            if len(pictures) == self.batch:
                yield self.reader.read(pictures, labels, Request([], torch.stack(numbers).numpy(), True))
                pictures, labels, numbers = [], [], []
        if pictures and not self.training:
            yield self.reader.read(pictures, labels, Request([], None, True))


def plain_jpeg(picture: Image.Image, mode: str) -> bytes:
    """The file of a JPEG that the GPU decodes as Pillow would; nothing for others."""
    file: Any = getattr(picture, "fp", None)
    if picture.format != "JPEG" or picture.mode != mode or file is None:
        return b""
    file.seek(0)
    data = file.read()
    if END in data[-AFTER_END:]:
        return data
    file.seek(0)
    return b""


def decode_jpegs(files: Sequence[Tensor], mode: str, device: torch.device) -> list[Tensor | None]:
    """Pictures on the device, uint8 `(channels, height, width)`; None for those that cannot be decoded.

    The decoder writes on a stream of its own, without regard to what the current one still has to do with the memory
    that it is given: so that has to be done first, and nothing may fill the memory meanwhile."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    settings: Any = torch.utils.deterministic
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(list(files), ImageReadMode.RGB if mode == "RGB" else ImageReadMode.GRAY, device=device)
    except (ImportError, RuntimeError):  # one of them is broken, or there is no decoder
        pass
    finally:
        settings.fill_uninitialized_memory = fill
    if len(files) == 1:
        return [None]
    half = len(files) // 2
    return decode_jpegs(files[:half], mode, device) + decode_jpegs(files[half:], mode, device)


@lru_cache(maxsize=8)
def decodes_jpegs(device: torch.device) -> bool:
    """Whether there is a decoder of JPEGs on this device: it is a GPU, and torchvision was built for it."""
    if device.type != "cuda":
        return False
    made = BytesIO()
    Image.new("RGB", (16, 16)).save(made, "JPEG")
    file = torch.frombuffer(bytearray(made.getvalue()), dtype=torch.uint8)
    return decode_jpegs([file], "RGB", device)[0] is not None
