"""From image files to uint8 pictures: what the streamed loader's workers do, and JPEGs decoded on the GPU.

A worker looks at the headers, draws the crops and cuts them out. JPEGs that the GPU is to decode it only reads: their
bytes travel, and the crop is cut out there. Those are the plain ones: Pillow decodes what has other colours, other
formats or no end, and says which file cannot be read.

Pillow and the GPU differ by a few grey levels, since each smooths JPEG's colours in its own way. Crops come to the
model's size by Pillow (`cut`), or a whole batch on the device (`cut_all`), where the two directions of the filter are
two products with matrices of weights. Both read a crop through the same filter, widened where pixels become fewer, and
nothing beyond the crop, so they agree to one grey level.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from linvit.errors import LinvitError
from linvit.images import eight_bits, naming
from linvit.tasks.classify.data import Images, Split, Stream
from linvit.tasks.classify.preprocessing import CROP_COLUMNS, Augmentation, Preprocessing, frames_of, seed_of

END = b"\xff\xd9"  # of a JPEG, perhaps with a little after it
AFTER_END = 32
LARGE = 1024  # pixels of a side above which crops are shrunk alone: together all take the room of the largest
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
REACH = {"bilinear": 1, "bicubic": 2}  # of a filter, in pixels


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
        self, images: Split, preprocessing: Preprocessing, augmentation: Augmentation | None, encoded: bool
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
        if self.augmentation is not None:  # crops are drawn in the pictures' frames, and here in their own pixels
            shapes = torch.tensor([(picture.height, picture.width) for picture in pictures]).float()
            frames = frames_of(shapes, size)
            drawn = self.augmentation.draw_boxes(torch.from_numpy(request.numbers), frames, size)
            crops = (drawn * (shapes / frames).repeat(1, 2)).numpy()
        decoded, files = [], []
        for place, picture in enumerate(pictures):
            data = b""
            with self.images.naming(request.indices[place]) if isinstance(self.images, Images) else nullcontext():
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
        lengths = [len(file) for file in files]
        return Chunk(np.array(labels), boxes, pixels, encoded, lengths, crops, request.indices, request.last)

    def decode(self, index: int) -> Tensor:
        """One whole picture, by Pillow."""
        assert isinstance(self.images, Images)
        return channels_first(in_mode(self.images[index][0], self.preprocessing.mode))


class StreamReader(IterableDataset):
    """An epoch of a stream, a step at a time. Crops are drawn by a picture's place in what its worker reads."""

    def __init__(self, reader: ChunkReader, batch: int, seed: int, epoch: int) -> None:
        assert isinstance(reader.images, Stream)
        self.reader, self.batch, self.seed = reader, batch, seed_of(seed, epoch)
        self.training = reader.augmentation is not None
        self.stream = reader.images.open(training=self.training, batch_size=batch, seed=seed)
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Chunk | LinvitError]:
        try:
            with naming(f"of {self.reader.images.name}"):
                yield from self.chunks()
        except LinvitError as error:
            yield error

    def chunks(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number, stream = worker.id if worker is not None else 0, enumerate(self.stream)
        while found := list(islice(stream, self.batch)):
            if self.training and len(found) < self.batch:
                return
            pictures, labels = zip(*(sample for _, sample in found), strict=True)
            draws = (torch.Generator().manual_seed(seed_of(self.seed, number, place)) for place, _ in found)
            numbers = np.stack([torch.rand(CROP_COLUMNS, generator=draw).numpy() for draw in draws])
            yield self.reader.read(pictures, [int(label) for label in labels], Request([], numbers, True))


def plain_jpeg(picture: Image.Image, mode: str) -> bytes:
    """The file of a JPEG that the GPU decodes as Pillow would; nothing for others."""
    file: Any = getattr(picture, "fp", None)
    if picture.format != "JPEG" or picture.mode != mode or file is None:
        return b""
    file.seek(0)
    data = file.read()
    file.seek(0)
    return data if END in data[-AFTER_END:] else b""


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


def hull(box: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """The whole pixels that a box (top, left, height, width) touches: first and last row, first and last column."""
    top, left, tall, wide = box
    bottom, right = math.ceil(top + tall - 1e-3), math.ceil(left + wide - 1e-3)
    return int(top + 1e-3), min(bottom, height), int(left + 1e-3), min(right, width)


def cut(picture: Image.Image, box: Sequence[float], size: tuple[int, int], mode: str, how: str) -> Tensor:
    """A crop (top, left, height, width) of a picture, uint8 `(channels, *size)`. A JPEG that has not been decoded yet
    is decoded at the scale that will do."""
    height, width = size
    before = picture.size
    fewer = math.ceil(before[0] * width / box[3]), math.ceil(before[1] * height / box[2])
    if 2 * fewer[0] <= before[0] and 2 * fewer[1] <= before[1]:
        picture.draft(picture.mode, fewer)
    down, across = picture.height / before[1], picture.width / before[0]
    top, left, tall, wide = box[0] * down, box[1] * across, box[2] * down, box[3] * across
    first, last, start, stop = hull((top, left, tall, wide), picture.height, picture.width)
    picture = in_mode(picture, mode).crop((start, first, stop, last))
    left, top = max(left - start, 0), max(top - first, 0)
    inner = (left, top, min(left + wide, picture.width), min(top + tall, picture.height))
    return channels_first(picture.resize((width, height), PILLOW[how], box=inner))


def in_mode(picture: Image.Image, mode: str) -> Image.Image:
    """The decoded picture in a mode of Pillow's, not copied where it has it."""
    picture = eight_bits(picture)
    return picture if picture.mode == mode else picture.convert(mode)


def channels_first(picture: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(picture))
    return values.permute(2, 0, 1) if values.ndim == 3 else values[None]


def cut_all(pictures: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], filters: Sequence[str]) -> Tensor:
    """Crops of decoded pictures, uint8 `(channels, height, width)` each, by boxes `(pictures, 4)` on the host. Large
    ones are shrunk one by one, the others together."""
    large = (boxes[:, 2:] > LARGE).any(1).tolist()
    groups: dict[tuple[str, int], list[int]] = {}
    for row, how in enumerate(filters):
        groups.setdefault((how, row if large[row] else -1), []).append(row)
    found = [shrink([pictures[row] for row in rows], boxes[rows], size, how) for (how, _), rows in groups.items()]
    order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return torch.cat(found)[order.to(pictures[0].device)]


def shrink(pictures: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], how: str) -> Tensor:
    """One filter's crops in one go, through rows and columns of weights."""
    device = pictures[0].device
    kind = torch.float16 if device.type == "cuda" else torch.float32
    hulls = [hull(box, *picture.shape[1:]) for picture, box in zip(pictures, boxes.tolist(), strict=True)]
    parts = [p[:, top:bottom, left:right] for p, (top, bottom, left, right) in zip(pictures, hulls, strict=True)]
    tall, wide = (max(part.shape[side] for part in parts) for side in (1, 2))
    whole = pictures[0].new_zeros(len(parts), len(parts[0]), tall, wide)
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[1], : part.shape[2]].copy_(part)
    corners = torch.tensor([(top, left) for top, _, left, _ in hulls])
    shapes = torch.tensor([part.shape[1:] for part in parts])
    down, across = (
        weights(boxes[:, side] - corners[:, side], boxes[:, 2 + side], shapes[:, side], room, size[side], how, device)
        for side, room in enumerate((tall, wide))
    )
    found = down.to(kind)[:, None] @ whole.to(kind) @ across.to(kind)[:, None].mT
    return found.float().round().clamp(0, 255).to(torch.uint8)


def weights(
    start: Tensor, length: Tensor, pixels: Tensor, room: int, count: int, how: str, device: torch.device
) -> Tensor:
    """What each of `room` pixels adds to each of `count` new ones, `(pictures, count, room)`. Of the old ones the first
    `pixels` are there, and the new ones lie evenly on `length` from `start` on."""
    start, length, pixels = (value.float().to(device)[:, None, None] for value in (start, length, pixels))
    step = length / count
    places = start + (torch.arange(count, device=device)[:, None] + 0.5) * step
    source = torch.arange(room, device=device)
    x = ((source + 0.5 - places) / step.clamp(min=1)).abs()
    near = 1 - x
    if how == "bicubic":
        near = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)
    near = torch.where((x < REACH[how]) & (source < pixels), near, 0)
    return near / near.sum(-1, keepdim=True)
