"""How a picture becomes a model's input: size, crop and colour statistics; and how it is varied in training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from linvit.conversion.convert import own_size
from linvit.errors import LinvitError
from linvit.training.config import Config


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
    def of(cls, model: nn.Module, size: int | None = None, crop: float | None = None) -> Preprocessing:
        """The model's own, as timm notes it. A model built for another image size knows that one."""
        noted = resolve_model_data_config(model)
        built = own_size(model)
        first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        channels = first.in_channels if first is not None else len(noted["mean"])
        mean, std = noted["mean"], noted["std"]
        if len(mean) != channels:
            mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
        return cls(
            (size, size) if size else (int(built[0]), int(built[1])),
            tuple(mean),
            tuple(std),
            noted["crop_pct"] if crop is None else crop,
            noted["interpolation"],
            noted["crop_mode"],
        )

    @property
    def mode(self) -> str:
        """Pillow's name for pictures with this many channels."""
        if len(self.mean) not in (1, 3):
            raise LinvitError(f"the model takes {len(self.mean)} channels: images have 1 or 3")
        return "L" if len(self.mean) == 1 else "RGB"

    def evaluation(self) -> Any:
        """timm's transform for evaluation, to uint8."""
        interpolation = "bilinear" if self.interpolation == "random" else self.interpolation
        return create_transform(
            self.size,
            crop_pct=self.crop,
            crop_mode=self.crop_mode,
            interpolation=interpolation,
            mean=self.mean,
            normalize=False,
        )


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
    train_interpolation: str = "model"  # of timm's transform; the device's is bilinear

    @classmethod
    def of(cls, config: Config) -> Augmentation:
        """What a recipe says."""
        names = cls.__dataclass_fields__.keys() - {"crop_ratio"}
        return cls(**{name: getattr(config, name) for name in names})

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def transform(self, preprocessing: Preprocessing, size: tuple[int, int]) -> Any:
        """timm's transform for training, to uint8. What needs whole batches comes later, on the device."""
        whole = self.crop_scale == (1.0, 1.0)
        own = self.train_interpolation == "model"
        made = create_transform(
            size,
            is_training=True,
            scale=self.crop_scale,
            ratio=(1.0, 1.0) if whole else self.crop_ratio,
            hflip=self.flip,
            color_jitter=self.colour_jitter,
            auto_augment=self.randaugment,
            interpolation=preprocessing.interpolation if own else self.train_interpolation,
            mean=preprocessing.mean,
            normalize=False,
        )
        for step in made.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = posterise
        return made


def posterise(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    """The highest bits only. At full strength timm keeps none, which newer versions of Pillow refuse: it is black."""
    return ImageOps.posterize(picture, bits) if bits else Image.new(picture.mode, picture.size)


def seeds_of(count: int, *parts: int) -> list[int]:
    """Seeds from several numbers, such as a seed, an epoch and a step."""
    return (np.random.SeedSequence(parts).generate_state(count, np.uint64) >> np.uint64(1)).tolist()


def seed_of(*parts: int) -> int:
    return seeds_of(1, *parts)[0]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Randomness from this seed, in all three generators that timm's transforms draw from; then as it was before."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
