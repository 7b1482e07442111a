"""How a picture becomes a model's input: size, crop and colour statistics; and how it is varied in training."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from linvit.conversion.convert import own_size
from linvit.errors import LinvitError
from linvit.training.config import Config

ATTEMPTS = 4  # torchvision tries ten times; a square picture has used these up three times in ten thousand
CROP_COLUMNS = 2 * ATTEMPTS + 2


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects. `crop` is the share of the picture's shorter side that evaluation looks at, `crop_mode`
    how, in timm's words."""

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop: float = 1.0
    interpolation: str = "bilinear"
    crop_mode: str = "center"

    @classmethod
    def of(cls, model: nn.Module, size: int | None = None, crop: float | None = None) -> "Preprocessing":
        """The model's own, as timm notes it. A model built for another image size knows that one."""
        noted = resolve_model_data_config(model)
        first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        mean, std = noted["mean"], noted["std"]
        channels = first.in_channels if first is not None else len(mean)
        if len(mean) != channels:
            mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
        height, width = (size, size) if size else own_size(model)
        crop = noted["crop_pct"] if crop is None else crop
        how = noted["interpolation"], noted["crop_mode"]
        return cls((int(height), int(width)), tuple(mean), tuple(std), crop, *how)

    @property
    def mode(self) -> str:
        """Pillow's name for pictures with this many channels."""
        if len(self.mean) not in (1, 3):
            raise LinvitError(f"the model takes {len(self.mean)} channels: images have 1 or 3")
        return "L" if len(self.mean) == 1 else "RGB"

    def evaluation(self) -> Any:
        """timm's transform for evaluation, to uint8."""
        how: dict[str, Any] = {
            "crop_pct": self.crop,
            "crop_mode": self.crop_mode,
            "mean": self.mean,
            "normalize": False,
        }
        return create_transform(self.size, interpolation=self.interpolation.replace("random", "bilinear"), **how)


@dataclass(frozen=True)
class Augmentation:
    """How training varies its pictures; the names are the recipe's."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    colour_jitter: float = 0.0
    randaugment: str | None = None  # in timm's notation
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch: float = 0.5
    train_interpolation: str = "model"  # how a crop that is larger than the model's size is shrunk

    @classmethod
    def of(cls, config: Config) -> "Augmentation":
        """What a recipe says."""
        names = cls.__dataclass_fields__.keys() - {"crop_ratio"}
        return cls(**{name: getattr(config, name) for name in names})

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def draw_boxes(self, u: Tensor, frames: tuple[int, int] | Tensor, size: tuple[int, int]) -> Tensor:
        """The crops of a batch as torchvision draws them, a box (top, left, height, width) in pixels for each picture,
        from its first CROP_COLUMNS uniform numbers: a share of the area, an aspect ratio, a place. `frames` are the
        height and width of all pictures, or of each `(batch, 2)`.

        The first attempt that fits counts; where none does, the most of the middle that has such a ratio. Without a
        crop (`crop_scale` 1 to 1) it is the most that has the model's shape."""
        least, most = (size[1] / size[0],) * 2 if self.crop_scale == (1.0, 1.0) else self.crop_ratio
        height, width = (
            u.new_full((1, 1), side) if isinstance(side, int) else side[:, None]
            for side in (frames if isinstance(frames, tuple) else frames.unbind(1))
        )
        area = height * width * (self.crop_scale[0] + (self.crop_scale[1] - self.crop_scale[0]) * u[:, :ATTEMPTS])
        low, high = math.log(least), math.log(most)
        aspect = torch.exp(low + (high - low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
        heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first = fits & (fits.cumsum(1) == 1)
        none = ~fits.any(1)
        height, width = height[:, 0], width[:, 0]
        tall = torch.where(none, torch.minimum(height, width / least).round(), (heights * first).sum(1))
        wide = torch.where(none, torch.minimum(width, height * most).round(), (widths * first).sum(1))
        down, across = u[:, 2 * ATTEMPTS : CROP_COLUMNS].unbind(1)
        top = torch.where(none, (height - tall) / 2, down * (height - tall + 1)).floor()
        left = torch.where(none, (width - wide) / 2, across * (width - wide + 1)).floor()
        return torch.stack([top, left, tall, wide], dim=1)

    def filters(self, preprocessing: Preprocessing) -> tuple[str, ...]:
        """By which crops are shrunk. Two take turns over a batch: its order is shuffled, so that is random enough."""
        chosen = preprocessing.interpolation if self.train_interpolation == "model" else self.train_interpolation
        return ("bilinear", "bicubic") if chosen == "random" else ("bicubic" if chosen == "bicubic" else "bilinear",)


def frames_of(shapes: Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels that crops of pictures are drawn in, `(batch, 2)`, from the pictures' heights and widths: their shape,
    just large enough for the model's size."""
    return (shapes / (shapes / shapes.new_tensor(size)).amin(1, keepdim=True)).round()


def seed_of(*parts: int) -> int:
    """A seed from several numbers, such as a seed, an epoch and a step."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
