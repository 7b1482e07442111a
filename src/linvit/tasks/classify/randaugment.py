"""RandAugment for whole batches: each picture its own operation, chosen by masks.

The fifteen operations, their strengths and the notation are timm's (`rand-m9-mstd0.5-inc1`). Two liberties make it
fast. Affine operations come before colour operations, joined with the crop in one resampling; in timm they come in
the order they were drawn. And equalisation, which needs a histogram, looks at no more than a sixth of a batch, which
only in an odd one leaves a picture out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.errors import LinvitError
from linvit.tasks.classify.colours import (
    autocontrast,
    blend,
    each,
    equalise,
    grey,
    mean_grey,
    posterise,
    smooth,
    solarise,
    solarise_add,
)
from linvit.tasks.classify.geometry import Affine

OPERATIONS = (
    "autocontrast",
    "equalise",
    "invert",
    "rotate",
    "posterise",
    "solarise",
    "solarise_add",
    "colour",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
COLUMNS = 4  # uniform numbers for each operation


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
    increasing: bool = False  # strength grows with the magnitude in every operation

    @classmethod
    def parse(cls, text: str) -> RandAugment:
        head, *parts = text.split("-")
        found: dict[str, float] = {}
        for part in parts:
            match = re.fullmatch(r"(m|n|p|mstd|mmax|inc)(\d+\.?\d*)", part)
            if match is None:
                raise LinvitError(f"RandAugment '{text}': '{part}' is none of m, n, p, mstd, mmax, inc with a number")
            found[match[1]] = float(match[2])
        if head != "rand":
            raise LinvitError(f"augmentation '{text}' is not RandAugment; write rand-m9-mstd0.5-inc1, for example")
        deviation = found.get("mstd", 0.0)
        return cls(
            found.get("m", 10.0),
            int(found.get("n", 2)),
            found.get("p", 0.5),
            math.inf if deviation > 100 else deviation,
            found.get("mmax", 10.0),
            bool(found.get("inc", 0)),
        )

    @property
    def columns(self) -> int:
        return COLUMNS * self.layers

    def draw(self, u: Tensor) -> list[Draw]:
        """The layers' operations from uniform numbers `(batch, columns)`."""
        draws = []
        for part in u.split(COLUMNS, dim=1):
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
        shear_x = torch.where(draw.has("shear_x"), 0.3 * signed, 0)
        shear_y = torch.where(draw.has("shear_y"), 0.3 * signed, 0)
        across = torch.where(draw.has("translate_x"), 0.45 * width * signed, 0)
        down = torch.where(draw.has("translate_y"), 0.45 * height * signed, 0)
        x, y = width / 2, height / 2  # turned about the middle, as Pillow does; shears keep the corner
        return Affine(
            cos, shear_x - sin, across + x - cos * x + sin * y, shear_y + sin, cos, down + y - sin * x - cos * y
        )

    def colour(self, images: Tensor, draw: Draw) -> Tensor:
        """The layer's colour operation."""
        level = draw.level
        if self.increasing:
            factor = (1 + 0.9 * level * draw.sign).clamp(min=0.1)
            bits, threshold = 4 - (4 * level).floor(), 256 - (256 * level).floor().clamp(max=256)
        else:
            factor = 1.8 * level + 0.1
            bits, threshold = (4 * level).floor(), (256 * level).floor().clamp(max=256)
        added = (110 * level).floor().clamp(max=128)
        zero = torch.zeros((), dtype=images.dtype, device=images.device)
        other = torch.where(each(draw.has("contrast")), mean_grey(images), zero)
        other = torch.where(each(draw.has("colour")), grey(images), other)
        other = torch.where(each(draw.has("sharpness")), smooth(images), other)
        blends = draw.has("contrast") | draw.has("colour") | draw.has("sharpness") | draw.has("brightness")
        out = torch.where(each(blends), blend(images, other, factor).floor(), images)
        for name, changed in (
            ("invert", 255 - images),
            ("autocontrast", autocontrast(images)),
            ("posterise", posterise(images, bits)),
            ("solarise", solarise(images, threshold)),
            ("solarise_add", solarise_add(images, added)),
        ):
            out = torch.where(each(draw.has(name)), changed, out)
        return equalise_some(out, draw.has("equalise"))


def equalise_some(images: Tensor, chosen: Tensor) -> Tensor:
    """Equalise the chosen pictures, as far as a part of fixed size holds them: shapes must not depend on the data."""
    room = min(len(images), max(32, len(images) // 6))
    rows = chosen.to(torch.uint8).argsort(descending=True, stable=True)[:room]
    part = images[rows]
    return images.index_copy(0, rows, torch.where(each(chosen[rows]), equalise(part), part))
