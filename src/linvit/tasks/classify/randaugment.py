"""RandAugment for whole batches: each picture its own operation, chosen by masks.

The fifteen operations, their strengths and the notation are timm's (`rand-m9-mstd0.5-inc1`). Two liberties make it
fast. Affine operations come before colour operations, joined with the crop in one resampling; in timm they come in
the order they were drawn. And equalisation, which needs a histogram, looks at no more than a sixth of a batch, which
only in an odd one leaves a picture out.

Colour operations take pixels as floats from 0 to 255, each picture with its own strength, and their results are
Pillow's within rounding.
"""

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import LinvitError

OPERATIONS: tuple[str, ...] = ("autocontrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise_add")
OPERATIONS += ("colour", "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y")
Affine = tuple[Tensor, ...]  # `(x, y) -> (a·x + b·y + c, d·x + e·y + f)`, Pillow's order, `(batch,)` each
COLUMNS = 4  # uniform numbers for each operation
NOTATION = {"m": "magnitude", "n": "layers", "p": "prob", "mstd": "deviation", "mmax": "maximum", "inc": "increasing"}


@dataclass(frozen=True)
class Draw:
    """One operation for each picture: its number (none: −1), its strength from 0 to 1, its sign."""

    operation: Tensor
    level: Tensor
    sign: Tensor

    def has(self, name: str) -> Tensor:
        return self.operation == OPERATIONS.index(name)


@dataclass(frozen=True)
class RandAugment:
    """The policy, from timm's notation."""

    magnitude: float = 10.0
    layers: int = 2
    prob: float = 0.5
    deviation: float = 0.0  # of the magnitude; infinite: uniform from 0
    maximum: float = 10.0
    increasing: float = 0.0  # not 0: strength grows with the magnitude in every operation

    @classmethod
    def parse(cls, text: str) -> "RandAugment":
        head, *parts = text.split("-")
        found = {}
        for part in parts:
            match = re.fullmatch(r"(m|n|p|mstd|mmax|inc)(\d+\.?\d*)", part)
            if match is None:
                raise LinvitError(f"RandAugment '{text}': '{part}' is none of m, n, p, mstd, mmax, inc with a number")
            found[NOTATION[match[1]]] = float(match[2])
        if head != "rand":
            raise LinvitError(f"augmentation '{text}' is not RandAugment; write rand-m9-mstd0.5-inc1, for example")
        made = cls(**found)  # type: ignore[arg-type]
        return replace(made, layers=int(made.layers), deviation=math.inf if made.deviation > 100 else made.deviation)

    @property
    def columns(self) -> int:
        return COLUMNS * self.layers

    def draw(self, u: Tensor) -> list[Draw]:
        """The layers' operations from uniform numbers `(batch, columns)`."""
        draws = []
        for part in u.split(COLUMNS, dim=1)[: self.layers]:
            choice, apply, strength, side = part.unbind(1)
            operation = (choice * len(OPERATIONS)).floor().clamp(max=len(OPERATIONS) - 1)
            if math.isinf(self.deviation):
                magnitude = self.magnitude * strength
            elif self.deviation:
                magnitude = self.magnitude + self.deviation * math.sqrt(2) * torch.erfinv(2 * strength - 1)
            else:
                magnitude = torch.full_like(strength, self.magnitude)
            level = magnitude.clamp(0, self.maximum) / 10
            draws.append(Draw(torch.where(apply < self.prob, operation, -1), level, torch.where(side < 0.5, -1.0, 1.0)))
        return draws

    def affine(self, draw: Draw, size: tuple[int, int]) -> Affine:
        """The layer as an affine map; the identity for pictures with another operation."""
        height, width = size
        signed = draw.level * draw.sign
        angle = torch.where(draw.has("rotate"), signed * math.radians(30), 0)
        cos, sin = angle.cos(), angle.sin()
        shear_x, shear_y = (torch.where(draw.has(name), 0.3 * signed, 0) for name in ("shear_x", "shear_y"))
        across = torch.where(draw.has("translate_x"), 0.45 * width * signed, 0)
        down = torch.where(draw.has("translate_y"), 0.45 * height * signed, 0)
        x, y = width / 2, height / 2  # turned about the middle, as Pillow does; shears keep the corner
        right, below = across + x - cos * x + sin * y, down + y - sin * x - cos * y
        return cos, shear_x - sin, right, shear_y + sin, cos, below

    def colour(self, images: Tensor, draw: Draw) -> Tensor:
        """The layer's colour operation."""
        level = draw.level
        factor, bits, threshold = 1.8 * level + 0.1, (4 * level).floor(), (256 * level).floor().clamp(max=256)
        if self.increasing:
            factor, bits, threshold = (1 + 0.9 * level * draw.sign).clamp(min=0.1), 4 - bits, 256 - threshold
        added, step = (110 * level).floor().clamp(max=128), torch.exp2(8 - each(bits))
        zero = torch.zeros((), dtype=images.dtype, device=images.device)
        other = torch.where(each(draw.has("contrast")), mean_grey(images), zero)
        other = torch.where(each(draw.has("colour")), grey(images), other)
        other = torch.where(each(draw.has("sharpness")), smooth(images), other)
        blends = draw.has("contrast") | draw.has("colour") | draw.has("sharpness") | draw.has("brightness")
        out = torch.where(each(blends), blend(images, other, factor).floor(), images)
        changes = {
            "invert": 255 - images,
            "autocontrast": autocontrast(images),
            "posterise": (images / step).floor() * step,  # the highest bits only
            "solarise": torch.where(images < each(threshold), images, 255 - images),  # inverted from a threshold on
            "solarise_add": torch.where(images < 128, (images + each(added)).clamp(max=255), images),  # the dark half
        }
        for name, changed in changes.items():
            out = torch.where(each(draw.has(name)), changed, out)
        return equalise_some(out, draw.has("equalise"))


def equalise_some(images: Tensor, chosen: Tensor) -> Tensor:
    """Equalise the chosen pictures, as far as a part of fixed size holds them: shapes must not depend on the data."""
    room = min(len(images), max(32, len(images) // 6))
    rows = chosen.to(torch.uint8).argsort(descending=True, stable=True)[:room]
    part = images[rows]
    return images.index_copy(0, rows, torch.where(each(chosen[rows]), equalise(part), part))


def each(values: Tensor) -> Tensor:
    """One value for each picture, `(batch,)`, ready for `(batch, channels, height, width)`."""
    return values.view(-1, 1, 1, 1)


def grey(images: Tensor) -> Tensor:
    """Luminance, `(batch, 1, height, width)`."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).round()[:, None]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Pillow's enhancement: factor 0 is the other picture, 1 no change, more than 1 away from the other."""
    return (other + each(factor) * (images - other)).clamp(0, 255)


def mean_grey(images: Tensor) -> Tensor:
    """The mean luminance, `(batch, 1, 1, 1)`: what contrast blends with."""
    return (grey(images).mean((2, 3), keepdim=True) + 0.5).floor()


def smooth(images: Tensor) -> Tensor:
    """Pillow's smoothing (ones around a five, over 13), which sharpness blends with; the rim stays as it is."""
    inner = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[..., 1:-1, 1:-1]) / 13
    height, width = images.shape[-2:]
    rows, columns = torch.arange(height, device=images.device)[:, None], torch.arange(width, device=images.device)
    rim = (rows == 0) | (rows == height - 1) | (columns == 0) | (columns == width - 1)
    return torch.where(rim, images, F.pad(inner, (1, 1, 1, 1)).round())


def jitter(images: Tensor, u: Tensor, strength: float) -> Tensor:
    """torchvision's colour jitter from uniform numbers `(batch, 3)`: brightness, contrast, saturation, in that order,
    where torchvision shuffles the order."""
    low = max(0.0, 1 - strength)
    bright, contrast, colour = (low + (1 + strength - low) * u).unbind(1)
    images = blend(images, torch.zeros_like(images[:1]), bright)
    images = blend(images, mean_grey(images), contrast)
    return blend(images, grey(images), colour)


def autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched to the full range."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    stretched = ((images - low) * (255 / (high - low).clamp(min=1e-6))).floor().clamp(0, 255)
    return torch.where(high > low, stretched, images)


def equalise(images: Tensor) -> Tensor:
    """Each channel's histogram made flat, by Pillow's table. Sorted pixels give the histogram: counting into bins would
    not repeat itself on a GPU without detours."""
    levels = images.round().to(torch.uint8).flatten(2)
    ordered = levels.sort(-1).values
    edges = torch.arange(256, dtype=torch.uint8, device=images.device).expand(*levels.shape[:2], 256).contiguous()
    below = torch.searchsorted(ordered, edges)  # pixels darker than each level
    step = below.gather(2, ordered[..., -1:].long()) // 255
    safe = step.clamp(min=1)
    table = torch.where(step > 0, ((below + safe // 2) // safe).clamp(max=255), edges)
    return table.gather(2, levels.long()).view(images.shape).to(images.dtype)
