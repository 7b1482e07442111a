"""Does a saved file do what the model does? Asked of the file itself, opened anew in another process, on photographs
that the other process prepares by the JSON beside the file; the model's own are prepared by timm. So a weight that
changed on the way is found, and so is preprocessing that was written down wrongly."""

from collections.abc import Sequence
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

# Largest relative error (RMS) that passes. Eight bits are judged by the accuracy that is shown, not by this.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "int8": float("inf")}


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
    precision: str, nodes: dict[str, str],
) -> Check:  # fmt: skip
    """Hold the saved file against the model. A mismatch is an error that names the first layer that departs."""
    images = prepared(model, pictures, how, size)
    wanted = answers(model, images)
    with Process(path) as process:
        found = [torch.from_numpy(part) for part in process.photographs(pictures, size)]
    check = compare(wanted, found, size)
    if not check.relative <= TOLERANCES[precision]:
        with Process(path) as process:
            rows = [process.run(image[None].numpy()) for image in images]
        same = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*rows, strict=True)]
        off = compare(wanted, same, size).relative
        error = f"{path.name} departs from the model by {check.relative:.1e} (relative RMS) at {size[0]}×{size[1]}"
        if off <= TOLERANCES[precision]:
            raise LinvitError(f"{error}: the preprocessing beside it is not the model's; export it again")
        where = first_departure(model, path, images[:1], nodes, TOLERANCES[precision])
        raise LinvitError(f"{error}, {where}; it was not kept")
    return check


def compare(wanted: Sequence[Tensor], found: Sequence[Tensor], size: tuple[int, int]) -> Check:
    if [part.shape for part in wanted] != [part.shape for part in found]:
        here, there = ([tuple(part.shape) for part in parts] for parts in (wanted, found))
        raise LinvitError(f"the exported file gives {there} where the model gives {here}")
    relative = max(relative_rms(one, other) for one, other in zip(found, wanted, strict=True))
    largest = max(float((one.double() - other.double()).abs().max()) for one, other in zip(found, wanted, strict=True))
    agreement = None
    if wanted[0].ndim == 2:
        agreement = float((wanted[0].argmax(1) == found[0].argmax(1)).float().mean())
    return Check(size, len(wanted[0]), largest, relative, agreement)


def relative_rms(out: Tensor, reference: Tensor) -> float:
    """NaN and infinity count as infinitely far."""
    if not bool(out.isfinite().all()):
        return float("inf")
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def first_departure(model: nn.Module, path: Path, image: Tensor, nodes: dict[str, str], tolerance: float) -> str:
    """The first layer inside the file that is off, in words; runtimes show their insides where they can."""
    if path.suffix not in (".onnx", ".xml"):
        return f"and {path.suffix} files do not show which layer is the first: export to onnx to see it"
    wanted = watch_layers(model, list(nodes), image)
    with Process(path, layers=list(nodes.values())) as process:
        found = process.run(image.numpy())[-len(nodes) :]
    for (name, values), seen in zip(((n, wanted.get(n)) for n in nodes), found, strict=True):
        if values is not None and seen.size and seen.shape == tuple(values.shape):
            off = relative_rms(torch.from_numpy(seen), values)
            if off > tolerance:
                return f"first in {name} (by {off:.1e})"
    return "behind the last layer that can be looked at"
