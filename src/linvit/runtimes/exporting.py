"""`linvit.export`: a model as a file for another runtime, verified before it has its name."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from linvit.conversion.convert import own_size
from linvit.conversion.rebuilding import hugging
from linvit.conversion.saving import label_names, load, preprocessing
from linvit.errors import LinvitError, unknown
from linvit.files import TEMPORARY, write_json
from linvit.measurement.record import package
from linvit.models.dense import DenseModel
from linvit.runtimes.coreml import check_structure
from linvit.runtimes.photographs import photographs
from linvit.runtimes.preparing import exported_twin, layer_names, layer_nodes, standing_twin, trace
from linvit.runtimes.process import Process, ProcessModel
from linvit.runtimes.target import Job, Target, hushed
from linvit.runtimes.verifying import Check, prepared, verify
from linvit.version import __version__

TARGETS = ("onnx", "openvino", "coreml", "executorch")
PRECISIONS = ("fp32", "fp16", "int8")
FORMAT = 1
CALIBRATION = 128  # images that int8 is calibrated on, at most
Measure = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Exported:
    """What `linvit.export` made: the file, how far it is from the model, and what its runtime tells of it."""

    path: Path
    target: str
    precision: str
    size: tuple[int, int]
    dynamic: bool
    bytes: int
    checks: tuple[Check, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # of the model, "before", and of the file, "after"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "checks": [asdict(check) for check in self.checks]}


def find_target(name: str) -> Target:
    """A runtime by name. Its own packages are imported when something is written."""
    if name not in TARGETS:
        raise unknown("runtime", name, TARGETS)
    found: Target = import_module(f"linvit.runtimes.{name}").TARGET
    return found


def export(
    model: nn.Module | str | Path,
    to: str = "onnx",
    path: str | Path | None = None,
    *,
    size: tuple[int, int] | int | None = None,
    dynamic: bool = False,
    precision: str = "fp32",
    calibrate: str | Path | None = None,
    images: str | Path | None = None,
    measure: Measure | None = None,
    count: int = 8,
) -> Exported:
    """Write a model as a file for `onnx`, `openvino`, `coreml` or `executorch`, and verify the file.

    `model` is a model or a folder that linvit saved; a detector's trunk, not its boxes. `path` is the file, beside
    which a JSON file tells preprocessing, labels and what was verified. `size` is height and width, the model's own
    unless told; a `dynamic` file takes any size and batch, another one image of that size. int8 wants images to
    `calibrate` on. `count` photographs, of the folder `images` where that is given, go through the file in another
    process and must come out as they do of the model; `measure` gives metrics of a model, and is asked of both.
    """
    target = find_target(to)
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    target.check(precision, dynamic)
    if precision == "int8" and calibrate is None:
        raise LinvitError("int8 is calibrated on images: give --calibrate DIR, a few hundred of those it will see")
    folder = None if isinstance(model, nn.Module) else Path(model)
    built = model if isinstance(model, nn.Module) else load(model)
    refuse_boxes(built)
    place = Path(path) if path is not None else (folder or Path()) / f"model{target.suffix}"
    if place.suffix != target.suffix:
        raise LinvitError(f"{target.title} files end in {target.suffix}, got '{place.name}'")
    pixels = (size, size) if isinstance(size, int) else size
    twin = standing_twin(built, pixels, dynamic)
    pixels = pixels or own_size(twin)
    how = picture_settings(twin)
    pictures = photographs(count, None if images is None else Path(images))
    seen, second = other_sizes(twin, pixels) if dynamic else (pixels, None)
    shown = prepared(twin, pictures[: 2 if dynamic else 1], how, seen)  # a batch of one would be taken for the only one
    made = exported_twin(twin, shown, dynamic=dynamic, precision=precision)
    calibration = [] if calibrate is None else photographs(CALIBRATION, Path(calibrate))
    batches = [image[None].numpy() for image in prepared(twin, calibration, how, pixels)] if calibration else []
    with hushed():
        program = trace(made, shown, dynamic=dynamic)
    nodes = layer_nodes(program, layer_names(made))
    sidecar = {
        "format": FORMAT, "linvit": __version__, "target": to, "precision": precision, "size": pixels,
        "dynamic": dynamic, "preprocessing": how, "classes": label_names(twin),
        "versions": {name: package(name) for name in ("torch", "timm", *target.packages)},
    }  # fmt: skip
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=place.parent) as beside:
        draft = Path(beside, place.name)
        try:
            with hushed():
                facts = target.write(Job(program, draft, precision, batches))
        except LinvitError:
            raise
        except Exception as error:  # the converters have no error of their own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LinvitError(f"{target.title} cannot convert this model: {type(error).__name__}: {reason}") from error
        write_json(Path(f"{draft}.json"), sidecar)
        checks, metrics = [], {}
        if target.runs_here:
            for at in filter(None, (pixels, second)):
                checks.append(verify(twin, draft, pictures, how, at, precision, nodes))
            if measure is not None:
                with Process(draft) as process:
                    file = ProcessModel(process, twin, how, pixels, one_by_one=not dynamic)
                    metrics = {"before": measure(twin), "after": measure(file)}
        else:
            with Process(draft) as process:
                facts |= check_structure(process.opened["operations"])
        found = Exported(place, to, precision, pixels, dynamic, size_of(draft), tuple(checks), facts, metrics)
        verified = {key: value for key, value in found.to_dict().items() if key in ("checks", "facts", "metrics")}
        write_json(Path(f"{draft}.json"), {**sidecar, **verified, "bytes": found.bytes})
        move_in(Path(beside), place.parent)
    return found


def refuse_boxes(model: nn.Module) -> None:
    if isinstance(model, DenseModel) and model.task == "detect":
        raise LinvitError(
            "how many boxes a detector gives depends on the picture, which these runtimes cannot have: "
            "export its trunk, linvit.export(model.backbone, …), and keep its head in PyTorch"
        )


def picture_settings(model: nn.Module) -> dict[str, Any]:
    """What is done to a picture before the model sees it, in timm's words."""
    if hugging(model):
        raise LinvitError("Hugging Face's models are exported by optimum; linvit exports timm's")
    known = preprocessing(model)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = first.in_channels if first is not None else 3
    for name in ("mean", "std"):
        if len(known[name]) != channels:
            known[name] = (sum(known[name]) / len(known[name]),) * channels
    crop_mode = known["crop_mode"] if known["crop_mode"] == "squash" else "center"
    picked = {name: known[name] for name in ("mean", "std", "crop_pct")}
    filter_ = "bilinear" if known["interpolation"] == "random" else known["interpolation"]
    return {**picked, "interpolation": filter_, "crop_mode": crop_mode}


def other_sizes(model: Any, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """A size to trace at, and a second one to verify: neither square nor the model's own."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    step = patch[0] if isinstance(patch, tuple) and patch[0] > 4 else 32

    def near(side: int, share: float) -> int:
        return max(step * 2, round(side * share / step) * step)

    return (near(size[0], 0.75), near(size[1], 1.25)), (near(size[0], 1.25), near(size[1], 0.75))


def size_of(path: Path) -> int:
    """Bytes on the disk, with what belongs to the file."""
    if path.is_dir():
        return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
    parts = [path, *(path.with_suffix(".bin"),) * (path.suffix == ".xml"), Path(f"{path}.data")]
    return sum(part.stat().st_size for part in parts if part.exists())


def move_in(source: Path, folder: Path) -> None:
    """Everything in a folder to its place; the JSON file, by which it is known to be whole, last."""
    for part in sorted(source.iterdir(), key=lambda part: part.suffix == ".json"):
        there = folder / part.name
        if there.is_dir():
            shutil.rmtree(there)
        os.replace(part, there)
