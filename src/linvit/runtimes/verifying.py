"""Does a saved file do what the model does? Asked of the file itself, opened anew in another process, on photographs
that the other process prepares by the JSON beside the file; the model's own are prepared by timm. So a weight that
changed on the way is found, and so is preprocessing that was written down wrongly."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.runtimes.preparing import watch_layers
from linvit.runtimes.process import Process

# Largest relative error (RMS) that passes. Eight bits are judged by the accuracy that is shown, not by this, as long as
# no answer is NaN or infinite.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "int8": sys.float_info.max}

# What layers give for an image, in the order of the program, as a runtime computes it.
Look = Callable[[Tensor], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Check:
    """How far a file is from the model on photographs of one size. `relative` is RMS, `largest` an absolute error,
    `agreement` the share of pictures with the same first class, of a classifier."""

    size: tuple[int, int]
    images: int
    largest: float
    relative: float
    agreement: float | None = None


def prepared(model: nn.Module, pictures: Sequence[np.ndarray], how: dict[str, Any], size: tuple[int, int]) -> Tensor:
    """The photographs as timm prepares them for the model."""
    names = ("mean", "std", "crop_pct", "crop_mode")
    transform = create_transform(
        (len(how["mean"]), *size), interpolation=how["interpolation"], **{name: how[name] for name in names}
    )
    mode = "L" if len(how["mean"]) == 1 else "RGB"
    return torch.stack([transform(Image.fromarray(picture).convert(mode)) for picture in pictures])


def answers(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The model's outputs, image by image, as the program gives them: a list, however the model wraps them."""
    with torch.inference_mode():
        rows = [flat(model(image[None])) for image in images]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def flat(out: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def verify(
    model: nn.Module, path: Path, pictures: Sequence[np.ndarray], how: dict[str, Any], size: tuple[int, int],
    precision: str, look: Look, *, together: bool = False,
) -> Check:  # fmt: skip
    """Hold the saved file against the model, on the photographs one by one or `together` in a batch. A mismatch is an
    error that names the first layer that departs."""
    images = prepared(model, pictures, how, size)
    wanted, classifies = answers(model, images), getattr(model, "num_classes", None) != 0
    with Process(path) as process:
        found = [torch.from_numpy(part) for part in process.photographs(pictures, size, together=together)]
    check = compare(wanted, found, size, classifies)
    if not check.relative <= TOLERANCES[precision]:
        batches = [images] if together else list(images.split(1))
        with Process(path) as process:
            rows = [process.run(batch.numpy()) for batch in batches]
        same = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*rows, strict=True)]
        off = compare(wanted, same, size).relative
        error = f"{path.name} departs from the model by {check.relative:.1e} (relative RMS) at {size[0]}×{size[1]}"
        if off <= TOLERANCES[precision]:
            raise LinvitError(f"{error}: the preprocessing beside it is not the model's; export it again")
        where = first_departure(model, batches[0], look, TOLERANCES[precision])
        raise LinvitError(f"{error}, {where}; it was not kept")
    return check


def compare(wanted: Sequence[Tensor], found: Sequence[Tensor], size: tuple[int, int], classifies: bool = True) -> Check:
    if [part.shape for part in wanted] != [part.shape for part in found]:
        here, there = ([tuple(part.shape) for part in parts] for parts in (wanted, found))
        raise LinvitError(f"the exported file gives {there} where the model gives {here}")
    relative = max(relative_rms(one, other) for one, other in zip(found, wanted, strict=True))
    largest = max(float((one.double() - other.double()).abs().max()) for one, other in zip(found, wanted, strict=True))
    agreement = None
    if classifies and wanted[0].ndim == 2:
        agreement = float((wanted[0].argmax(1) == found[0].argmax(1)).float().mean())
    return Check(size, len(wanted[0]), largest, relative, agreement)


def relative_rms(out: Tensor, reference: Tensor) -> float:
    """NaN and infinity count as infinitely far."""
    if not bool(out.isfinite().all()):
        return float("inf")
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def layers_inside(path: Path, nodes: dict[str, str]) -> Look:
    """What layers give inside a file, by the names of its nodes."""

    def look(image: Tensor) -> dict[str, np.ndarray]:
        with Process(path, layers=list(nodes.values())) as process:
            found = process.run(image.numpy())
        return dict(zip(nodes, found[len(found) - len(nodes) :], strict=True))

    return look


def first_departure(model: nn.Module, image: Tensor, look: Look, tolerance: float) -> str:
    """The first layer that is off, in words."""
    found = look(image)
    wanted = watch_layers(model, list(found), image)
    for name, seen in found.items():
        values = wanted.get(name)
        if values is not None and seen.size and seen.shape == tuple(values.shape):
            off = relative_rms(torch.from_numpy(seen), values)
            if off > tolerance:
                return f"first in {name} (by {off:.1e})"
    return "behind the last layer that can be looked at"
