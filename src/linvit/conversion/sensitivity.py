"""Which layers a model can least do without, measured on real images against the untouched model.

The sensitivity of a layer is how far the outputs turn when only that layer becomes linear. Which layers to keep
quadratic is a different question, since errors add up along the model: keeping the most sensitive ones one by one can
do worse than keeping the first. So the choice is made where it will be used: from a model that is linear everywhere,
the layer whose quadratic form brings the outputs back furthest is kept, then the next. MixA analyses its layers too but
does not say how: this is our way.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.conversion.convert import find_hosts, find_steps, install, names_to_drop
from linvit.conversion.dry_run import image_part, inputs_for
from linvit.conversion.plan import Plan, as_plan
from linvit.errors import LinvitError


@dataclass(frozen=True)
class LayerSensitivity:
    """How far the outputs turn (1 − cosine similarity, mean over images) when only this layer is linear; and when the
    layer was kept, counted from 1, with the similarity reached then. Layers never kept have none."""

    index: int
    name: str
    turn: float
    kept: int | None = None
    similarity: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The measured layers, in the order of the model; `similarity` is that of the model linear everywhere."""

    layers: tuple[LayerSensitivity, ...]
    images: int
    similarity: float

    @property
    def keep(self) -> tuple[int, ...]:
        """The layers to keep quadratic, in the order of the model."""
        return tuple(layer.index for layer in self.layers if layer.kept is not None)


def measure_sensitivity(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    keep: int = 6,
    linear: str | Plan = "stella",
    quadratic: str | Plan | None = "relu_quadratic",
    drop: Iterable[str] = (),
    images: int = 256,
    advance: Callable[[], None] = lambda: None,
) -> Sensitivity:
    """Measure every layer and choose `keep` to stay quadratic, on up to `images` images. The model is not changed.

    Kept layers get the mechanism `quadratic`, or stay as they are with None. `drop` names what is dropped, as for
    `convert`; a mechanism that is given by its name may also give up what MixA gives up. `advance` is called after each
    pass over the images.
    """
    drop = names_to_drop(drop)
    batches = list(first_images(loader, images, next(model.parameters()).device))
    names = [name for name, _ in find_hosts(model)]
    if not 0 <= keep <= len(names):
        raise LinvitError(f"cannot keep {keep} layers: the model has {len(names)}")
    teacher = [outputs(model, batch) for batch in batches]
    student = copy.deepcopy(model)
    parts = {"original": {name: copy.deepcopy(student.get_submodule(name)) for name in names}}
    parts["quadratic"] = parts["original"]
    for kind, plan in (("quadratic", quadratic), ("linear", linear)):
        if plan is None:
            continue
        plan = replace(as_plan(plan), drop=as_plan("mixa").drop) if isinstance(plan, str) else plan
        install(student, find_steps(student, plan, drop)[0])
        parts[kind] = {name: twin_of(student.get_submodule(name)) for name in names}

    def turned(default: str, other: str, changed: Iterable[str]) -> float:
        """How far the outputs turn with some layers of another kind than the rest."""
        for name in names:
            student.set_submodule(name, parts[other if name in changed else default][name])
        advance()
        return turn(teacher, [outputs(student, batch) for batch in batches])

    alone = {name: turned("original", "linear", (name,)) for name in names}
    start = turned("linear", "quadratic", ())
    kept: dict[str, float] = {}
    for _ in range(keep):
        tried = {name: turned("linear", "quadratic", (*kept, name)) for name in names if name not in kept}
        best = min(tried, key=lambda name: tried[name])
        kept[best] = 1 - tried[best]
    place = {name: i for i, name in enumerate(kept, start=1)}
    layers = (LayerSensitivity(i, n, alone[n], place.get(n), kept.get(n)) for i, n in enumerate(names))
    return Sensitivity(tuple(layers), sum(len(batch) for batch in batches), 1 - start)


def twin_of(host: nn.Module) -> nn.Module:
    """A copy of a host that goes on hearing of the grid in its model."""
    grids = getattr(host, "grids", None)
    return copy.deepcopy(host, {id(grids): grids})


def passes(layers: int, keep: int) -> int:
    """How often `measure_sensitivity` runs the images through a model: `advance` is called as often."""
    return layers + 1 + sum(layers - done for done in range(keep))


def output_similarity(model: nn.Module, other: nn.Module, loader: Iterable[Any], images: int = 256) -> float:
    """Mean cosine similarity of two models' outputs on the same images."""
    batches = list(first_images(loader, images, next(model.parameters()).device))
    return 1 - turn([outputs(model, b) for b in batches], [outputs(other, b) for b in batches])


def first_images(loader: Iterable[Any], images: int, device: torch.device) -> Iterator[Tensor]:
    """Batches of images until there are enough; a loader may yield tensors or tuples that start with one."""
    left = images
    for item in loader:
        batch = item[0] if isinstance(item, list | tuple) else item
        if not isinstance(batch, Tensor) or batch.ndim != 4:
            raise LinvitError("the calibration loader must yield image batches (batch, channels, height, width)")
        yield batch[:left].to(device)
        left -= len(batch)
        if left <= 0:
            return
    if left == images:
        raise LinvitError("the calibration loader is empty")


def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    """The model's outputs in evaluation mode, one row per image, centred so that a common offset does not count; of a
    detector or a segmenter, the maps that its head reads, and of what Hugging Face gives the first."""
    part = image_part(model)
    training = part.training
    try:
        with torch.no_grad():
            out = part.eval()(**inputs_for(part, batch))
    finally:
        part.train(training)
    if isinstance(out, Mapping):
        out = next(iter(out.values()))
    elif isinstance(out, list | tuple) and part is model:
        out = out[0]
    levels = out if isinstance(out, list | tuple) else [out]
    rows = torch.cat([level.flatten(1) for level in levels], dim=1).double()
    return rows - rows.mean(1, keepdim=True)


def turn(teacher: list[Tensor], student: list[Tensor]) -> float:
    """1 − cosine similarity, mean over images."""
    similarity = torch.cat([F.cosine_similarity(a, b) for a, b in zip(teacher, student, strict=True)])
    if not similarity.isfinite().all():
        raise LinvitError("the outputs are not finite: check the calibration images and the model's weights")
    return float(1 - similarity.mean())
