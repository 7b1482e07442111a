"""`linvit.export`: a model as a file for another runtime, verified before it has its name."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from linvit.conversion.convert import own_size
from linvit.conversion.rebuilding import hugging, inner
from linvit.conversion.saving import load, note, preprocessing
from linvit.errors import LinvitError, reason, unknown
from linvit.files import clear_temporary, is_full, move_in, place, temporary_folder, write_json, writing
from linvit.images import Progress, quiet
from linvit.measurement.record import package
from linvit.models.backbones import Backbone
from linvit.models.dense import DenseModel
from linvit.models.labels import known_class_names
from linvit.runtimes.coreml import check_structure
from linvit.runtimes.photographs import photographs
from linvit.runtimes.preparing import (
    WithLayers,
    exported_twin,
    layer_names,
    layer_nodes,
    standing_twin,
    trace,
    watch_layers,
)
from linvit.runtimes.process import Process, ProcessModel, ProcessSegmenter
from linvit.runtimes.target import ExportJob, Target, hushed
from linvit.runtimes.verifying import Check, Look, answers, layers_inside, prepared, verify
from linvit.version import __version__

TARGETS = ("onnx", "openvino", "coreml", "executorch")
PRECISIONS = ("fp32", "fp16", "int8")
FORMAT = 1
PACKAGE = ".mlpackage"  # the one kind of file that is a folder
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
    progress: Progress = quiet,
) -> Exported:
    """Write a model as a file for `onnx`, `openvino`, `coreml` or `executorch`, and verify the file.

    `model` is a model or a folder that linvit saved; a detector's trunk, not its boxes. `path` is the file, beside
    which a JSON file tells preprocessing, labels and what was verified. `size` is height and width, the model's own
    unless told; a `dynamic` file takes any size and batch, another one image of that size. int8 wants images to
    `calibrate` on. `count` photographs, of the folder `images` where that is given, go through the file in another
    process and must come out as they do of the model; `measure` gives metrics of a model, and is asked of both.

    Where the JSON file is, the file is whole: it goes first of an older export in the same place, and comes last.
    """
    target = find_target(to)
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    target.check(precision, dynamic)
    check_asked(target, precision, calibrate, measure, count)
    saved = not isinstance(model, nn.Module) and Path(model).is_dir()
    file = place(path) if path is not None else Path(str(model) if saved else "", f"model{target.suffix}")
    check_place(file, target)
    built = model if isinstance(model, nn.Module) else load(model)
    refuse_boxes(built)
    pixels = (size, size) if isinstance(size, int) else size
    twin: Any = standing_twin(built, pixels, dynamic)
    pixels = pixels or own_size(whole_trunk(twin))
    how = picture_settings(twin)
    note(twin, input_size=(len(how["mean"]), *pixels))  # by which its metric is measured too
    pictures = photographs(count, None if images is None else Path(images))
    seen, second = other_sizes(twin, pixels) if dynamic else (pixels, None)
    # A batch of one would be taken for the only one.
    shown = prepared(twin, (pictures * 2)[:2] if dynamic else pictures[:1], how, seen)
    check_images(twin, shown, dynamic)
    made = exported_twin(twin, shown, dynamic=dynamic, precision=precision)
    calibration = [] if calibrate is None else photographs(CALIBRATION, Path(calibrate))
    batches = [image[None].numpy() for image in prepared(twin, calibration, how, pixels)] if calibration else []
    sidecar = {
        "format": FORMAT, "linvit": __version__, "target": to, "precision": precision, "size": pixels,
        "dynamic": dynamic, "preprocessing": how, "classes": known_class_names(twin),
        "versions": {name: package(name) for name in ("torch", "timm", *target.packages)},
    }  # fmt: skip
    with ExitStack() as stack:
        steps = 3 + (second is not None) + 2 * (measure is not None)
        advance = stack.enter_context(progress(f"exporting to {target.title}", steps))
        with hushed():
            program = trace(made, shown, dynamic=dynamic)
        nodes = layer_nodes(program, layer_names(made)) if target.shows_layers else {}
        advance()
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            clear_temporary(file.parent)
            beside = stack.enter_context(temporary_folder(file.parent))
        draft = beside / file.name
        try:
            with hushed():
                facts = target.write(ExportJob(program, draft, precision, batches))
        except Exception as error:  # the converters have no error of their own
            if isinstance(error, LinvitError) or is_full(error):
                raise
            why = f"{type(error).__name__}: {reason(error)}"
            raise LinvitError(f"{target.title} cannot convert this model: {why}") from error
        write_json(Path(f"{draft}.json"), sidecar)
        advance()
        checks, metrics = [], {}
        if target.runs_here:
            look = layers_inside(draft, nodes) if target.shows_layers else layers_beside(draft, target, made)
            checks.append(verify(twin, draft, pictures, how, pixels, precision, look))
            advance()
            if second is not None:
                checks.append(verify(twin, draft, pictures, how, second, precision, look, together=True))
                advance()
            if measure is not None:
                metrics["before"] = measure(twin)
                advance()
                with Process(draft) as process:
                    kind = ProcessSegmenter if isinstance(twin, DenseModel) else ProcessModel
                    metrics["after"] = measure(kind(process, twin, how, pixels, one_by_one=not dynamic))
                advance()
        else:
            with Process(draft) as process:
                facts |= check_structure(process.opened["operations"])
        found = Exported(file, to, precision, pixels, dynamic, size_of(draft), tuple(checks), facts, metrics)
        verified = {key: value for key, value in found.to_dict().items() if key in ("checks", "facts", "metrics")}
        write_json(Path(f"{draft}.json"), {**sidecar, **verified, "bytes": found.bytes})
        with writing(file):
            in_two = Path(f"{draft}.data").exists()
            move_in(beside, file.parent, f"{file.name}.json")
            if not in_two:
                Path(f"{file}.data").unlink(missing_ok=True)  # of a larger model that was exported here
    return found


def check_asked(
    target: Target, precision: str, calibrate: str | Path | None, measure: Measure | None, count: int
) -> None:
    """Refuse what does not go together, before any work is done."""
    if precision == "int8" and calibrate is None:
        raise LinvitError("int8 is calibrated on images: give --calibrate DIR, a few hundred of those it will see")
    if precision != "int8" and calibrate is not None:
        raise LinvitError(f"only int8 is calibrated: give --precision int8, or leave --calibrate out for {precision}")
    if measure is not None and not target.runs_here:
        raise LinvitError(f"{target.title} runs on Apple's systems only, so nothing can be measured: leave --data out")
    if count < 1:
        raise LinvitError("a file is verified on photographs: give one at least")


def check_place(file: Path, target: Target) -> None:
    if file.suffix != target.suffix:
        raise LinvitError(f"{target.title} files end in {target.suffix}, got '{file.name}'")
    if file.is_dir() and target.suffix != PACKAGE:
        raise LinvitError(f"{file} is a folder: give a file")


def layers_beside(draft: Path, target: Target, made: nn.Module) -> Look:
    """What layers give in a second file, made like a first that does not show its insides, with them as outputs."""

    def look(image: Tensor) -> dict[str, np.ndarray]:
        path, layers = draft.with_stem("layers"), list(watch_layers(made, layer_names(made), image))
        with hushed():
            target.write(ExportJob(trace(WithLayers(made, layers), image, dynamic=False), path, "fp32"))
        with Process(path) as process:
            found = process.run(image.numpy())
        return dict(zip(layers, found[len(found) - len(layers) :], strict=True))

    return look


def refuse_boxes(model: nn.Module) -> None:
    if isinstance(model, DenseModel) and model.task == "detect":
        raise LinvitError(
            "how many boxes a detector gives depends on the picture, which these runtimes cannot have: "
            "export its trunk, linvit.export(model.backbone, …), and keep its head in PyTorch"
        )


def check_images(model: nn.Module, images: Tensor, dynamic: bool) -> None:
    """Whether the model takes images of this size at all."""
    try:
        answers(model, images[:1])
    except LinvitError:
        raise
    except Exception as error:  # whatever a layer of it says
        wrong = f"{type(model).__name__} takes no images of {images.shape[2]}×{images.shape[3]} pixels"
        hint = "leave --dynamic out" if dynamic else "build it for that size, or give another --size"
        raise LinvitError(f"{wrong} ({reason(error)}): {hint}") from error


def picture_settings(model: nn.Module) -> dict[str, Any]:
    """What is done to a picture before the model sees it, in timm's words."""
    if hugging(model):
        raise LinvitError("Hugging Face's models are exported by optimum; linvit exports timm's")
    known = preprocessing(whole_trunk(model))
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = first.in_channels if first is not None else 3
    if channels not in (1, 3):
        raise LinvitError(f"the model takes {channels} channels: the photographs it is verified on have 1 or 3")
    for name in ("mean", "std"):
        if len(known[name]) != channels:
            known[name] = (sum(known[name]) / len(known[name]),) * channels
    crop_mode = known["crop_mode"] if known["crop_mode"] == "squash" else "center"
    picked = {name: known[name] for name in ("mean", "std", "crop_pct")}
    filter_ = "bilinear" if known["interpolation"] == "random" else known["interpolation"]
    return {**picked, "interpolation": filter_, "crop_mode": crop_mode}


def whole_trunk(model: nn.Module) -> nn.Module:
    """The timm model in a detector's backbone or in timm's feature wrapper, which knows what pictures it wants; else
    the model."""
    return model.trunk if isinstance(model, Backbone) else inner(model)


def other_sizes(model: Any, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """A size to trace at, and a second one to verify: neither square nor the model's own."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    step = patch[0] if isinstance(patch, tuple) and patch[0] > 4 else 32
    small = [max(2, math.floor(side * 0.75 / step)) * step for side in size]
    large = [max(few + step, math.ceil(side * 1.25 / step) * step) for side, few in zip(size, small, strict=True)]

    def oblong(height: int, width: int) -> tuple[int, int]:
        return height + step * (height == width), width

    return oblong(small[0], large[1]), oblong(large[0], small[1])


def size_of(path: Path) -> int:
    """Bytes on the disk, with what belongs to the file."""
    if path.is_dir():
        return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
    parts = [path, *(path.with_suffix(".bin"),) * (path.suffix == ".xml"), Path(f"{path}.data")]
    return sum(part.stat().st_size for part in parts if part.exists())
