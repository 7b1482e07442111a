"""How an annotated image becomes a model's input: resized, cut, mirrored, with its boxes and masks in step.

Randomness comes from PyTorch's global generator, as in torchvision; who wants the same picture again seeds it
(`loading` does). Pixels stay uint8 here: they travel so, and on the device their colours vary, which took most of a
worker's time, and they are normalised and padded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from linvit.errors import LinvitError, unknown
from linvit.models.dense import Target
from linvit.tasks.dense.pixels import Size
from linvit.tasks.dense.samples import Sample

RESIZES = ("square", "longest", "shortest")
LEAST = 1.0  # pixels that a box must be wide and tall to be learnt
AT_ONCE = 2**27  # pixels of maps that are brought to an image's size together, half a gigabyte
BRIGHTNESS, CONTRAST, SATURATION, HUE = (0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)  # as SSD varies colours
OF_THE_IMAGE = ("size", "colours")  # what a target says of the image, not of an object

Parts = dict[str, Tensor]  # image, boxes and masks of a sample, as torchvision's tensors that know what they are


@dataclass(frozen=True)
class TransformSettings:
    """What a recipe says of images.

    `resize` says how an image comes to `size`: `square` gives both sides that size, whatever the image's shape;
    `longest` its longer side, and `shortest` its shorter one, but the longer one `longest` at most. In training a size
    is drawn from `sizes`, if there are any. `scale_jitter` multiplies it by a factor between two, and cuts at random
    what is then larger than `size`. A box of which less than a pixel is left in width or height is not learnt.
    `photometric` varies brightness, contrast, saturation and hue as SSD does."""

    size: int = 512
    resize: str = "square"
    longest: int | None = None
    sizes: tuple[int, ...] = ()
    scale_jitter: tuple[float, float] | None = None
    flip: float = 0.5
    photometric: bool = False
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise unknown("resize", self.resize, RESIZES)
        if min((self.size, *self.sizes)) < 1:
            raise LinvitError(f"an image cannot have {min((self.size, *self.sizes))} pixels: give a larger size")
        if self.scale_jitter is not None and not 0 < self.scale_jitter[0] <= self.scale_jitter[1]:
            raise LinvitError(
                f"scale_jitter {self.scale_jitter} is no range: give two factors above 0, the smaller first"
            )

    def resized(self, height: int, width: int, size: int, factor: float = 1.0) -> Size:
        """Height and width of an image that comes to a size, times a factor."""
        if self.resize == "square":
            return (max(round(size * factor), 1),) * 2
        if self.resize == "longest":
            ratio = size / max(height, width)
        else:
            ratio = size / min(height, width)
            if self.longest is not None:
                ratio = min(ratio, self.longest / max(height, width))
        return max(round(height * ratio * factor), 1), max(round(width * ratio * factor), 1)

    def canvas(self, training: bool) -> int:
        """The side to which all images are padded; 0 where it is each batch's largest."""
        if training and self.scale_jitter is not None:
            return self.size
        if self.resize == "shortest":
            return 0
        return max((*self.sizes, self.size) if training else (self.size,))


@dataclass(frozen=True)
class TrainTransform:
    """An image and what is to be learnt of it, drawn anew at each call; how its colours are to vary comes with them, as
    `colours`. Crowds are left out, as torchvision's reference leaves them; difficult objects stay in, for without them
    they would be learnt as background."""

    settings: TransformSettings

    def __call__(self, sample: Sample) -> tuple[Tensor, Target]:
        settings = self.settings
        parts, labels = parts_of(sample)
        size = settings.sizes[int(torch.randint(len(settings.sizes), ()))] if settings.sizes else settings.size
        factor = 1.0 if settings.scale_jitter is None else uniform(settings.scale_jitter)
        height, width = F.get_size(parts["image"])
        wanted = settings.resized(height, width, size, factor)
        parts = each(parts, lambda part: resize(part, wanted))
        if settings.scale_jitter is not None:
            cut = draw_cut(wanted, settings.size)
            parts = each(parts, lambda part: F.crop(part, *cut))
        if chance(settings.flip):
            parts = each(parts, F.horizontal_flip)
        image = parts["image"].as_subclass(Tensor)
        target: Target = {"size": torch.tensor(image.shape[-2:])}
        if settings.photometric:
            target["colours"] = draw_colours()
        if "boxes" not in parts:
            return image, {**target, "labels": parts["masks"][0].as_subclass(Tensor).long()}
        boxes = parts["boxes"].as_subclass(Tensor)
        kept = (boxes[:, 2:] - boxes[:, :2] >= LEAST).all(1)
        target |= {"boxes": boxes, "labels": labels}
        if "masks" in parts:
            target["masks"] = parts["masks"].as_subclass(Tensor)
            kept &= (target["masks"].flatten(1) > 0).any(1)
        return image, {name: value if name in OF_THE_IMAGE else value[kept] for name, value in target.items()}


@dataclass(frozen=True)
class EvalTransform:
    """An image as it is judged. The truths stay in the image's own pixels; `to_original` brings there what the model
    says."""

    settings: TransformSettings

    def __call__(self, sample: Sample) -> tuple[Tensor, Target]:
        image, target = self.image(sample.image)
        target["image_id"] = torch.tensor(sample.image_id)
        truths = {name: getattr(sample, name) for name in ("labels", "boxes", "iscrowd", "difficult", "areas", "masks")}
        return image, {**target, **{name: value for name, value in truths.items() if value is not None}}

    def image(self, image: Tensor) -> tuple[Tensor, Target]:
        """The same for an image of which nothing is known."""
        height, width = image.shape[-2:]
        resized = resize(tv_tensors.Image(image), self.settings.resized(height, width, self.settings.size))
        sizes = {"size": torch.tensor(resized.shape[-2:]), "original": torch.tensor([height, width])}
        return resized.as_subclass(Tensor), sizes


def to_original(prediction: Any, target: Target) -> Any:
    """What a model says of an image, in the pixels of the original: logits `(classes, height, width)`, or a dict with
    boxes and perhaps masks, `(n, height, width)` or `(n, 1, height, width)`."""
    if isinstance(prediction, Tensor):
        return stretch(prediction, target)
    found = dict(prediction)
    height, width = target["original"].tolist()
    down, across = (target["original"] / target["size"]).tolist()
    boxes = prediction["boxes"]
    boxes = boxes * boxes.new_tensor([across, down, across, down])
    found["boxes"] = torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))
    if "masks" in prediction:
        found["masks"] = stretch(prediction["masks"], target)
    return found


def stretch(maps: Tensor, target: Target) -> Tensor:
    """Maps `(…, height, width)` without their padding, at the original's size. Integer and boolean maps are
    taken from the nearest pixel."""
    height, width = target["size"].tolist()
    size = tuple(target["original"].tolist())
    flat = maps[..., :height, :width].reshape(1, -1, height, width)
    if not flat.shape[1]:
        return maps.new_zeros(*maps.shape[:-2], *size)
    if maps.is_floating_point():
        flat = functional.interpolate(flat, size, mode="bilinear", align_corners=False)
    else:
        few = flat.split(at_once(target), dim=1)
        flat = torch.cat([functional.interpolate(f.float(), size, mode="nearest-exact").to(f.dtype) for f in few], 1)
    return flat.reshape(*maps.shape[:-2], *size)


def label_map(logits: Tensor, target: Target) -> Tensor:
    """The class with the largest logit at each pixel of the original, `(height, width)`; −1 where not all are finite.
    Logits are `(classes, height, width)`, and a few of them are brought to that size at a time."""
    best = logits.new_full(target["original"].tolist(), -torch.inf, dtype=torch.float32)
    labels, known = torch.zeros_like(best, dtype=torch.int64), torch.ones_like(best, dtype=torch.bool)
    first = 0
    for few in logits.split(at_once(target)):
        found = stretch(few.float(), target)
        value, place = found.max(0)
        labels = torch.where(value > best, place + first, labels)
        best, known, first = torch.maximum(value, best), known & found.isfinite().all(0), first + len(few)
    return labels.masked_fill(~known, -1)


def at_once(target: Target) -> int:
    """How many maps are brought to the original's size together."""
    return max(1, AT_ONCE // int(target["original"].prod()))


def parts_of(sample: Sample) -> tuple[Parts, Tensor]:
    """What has to be kept in step, and the labels of the objects that are to be learnt."""
    image = tv_tensors.Image(sample.image)
    if sample.boxes is None or sample.iscrowd is None:
        return {"image": image, "masks": tv_tensors.Mask(sample.labels[None].byte())}, sample.labels
    kept = ~sample.iscrowd
    size: Any = {"format": "XYXY", "canvas_size": tuple(image.shape[-2:])}
    parts: Parts = {"image": image, "boxes": tv_tensors.BoundingBoxes(sample.boxes[kept], **size)}
    if sample.masks is not None:
        parts["masks"] = tv_tensors.Mask(sample.masks[kept])
    return parts, sample.labels[kept]


def each(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    return {name: change(part) for name, part in parts.items()}


def resize(part: Tensor, size: Size) -> Tensor:
    """A part at another size. Masks take the nearest pixel by its centre; torchvision's own way is half a pixel off."""
    if not isinstance(part, tv_tensors.Mask):
        return F.resize(part, list(size), antialias=True)
    if not len(part):
        return tv_tensors.Mask(part.new_zeros(0, *size))
    return tv_tensors.Mask(F.resize_image(part.as_subclass(Tensor), list(size), InterpolationMode.NEAREST_EXACT))


def draw_cut(size: Size, most: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part that is at most so large."""
    height, width = (min(side, most) for side in size)
    top, left = (int(torch.randint(side - kept + 1, ())) for side, kept in zip(size, (height, width), strict=True))
    return top, left, height, width


def draw_colours() -> Tensor:
    """How colours are to vary, `(5,)` for `colours.vary`: factors of brightness, contrast, saturation, a shift of hue,
    and a factor of contrast again, which varies before or after the others. Each change has a chance of one half."""
    early = chance(0.5)
    steps = [("brightness", BRIGHTNESS), ("saturation", SATURATION), ("hue", HUE)]
    steps.insert(1 if early else 3, ("contrast" if early else "late", CONTRAST))
    drawn = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0, "late": 1.0}
    for name, span in steps:
        if chance(0.5):
            drawn[name] = uniform(span)
    return torch.tensor(list(drawn.values()))


def uniform(span: tuple[float, float]) -> float:
    return span[0] + (span[1] - span[0]) * float(torch.rand(()))


def chance(probability: float) -> bool:
    return float(torch.rand(())) < probability
