"""What a classifier gets right on a set: `linvit.evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from linvit.conversion.opening import open_model
from linvit.conversion.saving import read_config
from linvit.errors import LinvitError
from linvit.tasks.classify import metrics
from linvit.tasks.classify.checks import check_size, check_teacher_size, outputs_of
from linvit.tasks.classify.classes import match_classes
from linvit.tasks.classify.data import open_split, undivided
from linvit.tasks.classify.fitting import Sets, Split
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.classify.resident import Progress, quiet
from linvit.tasks.classify.training import Model, Note, described, tell
from linvit.training.checkpoints import Watch
from linvit.training.config import Config
from linvit.training.objectives.teacher import Teacher, check_teacher, open_teacher
from linvit.training.processes import make_processes


def evaluate(
    model: Model,
    data: str | Path | Split,
    *,
    teacher: Model | None = None,
    size: int | None = None,
    split: str = "",
    batch: int = 256,
    precision: str = "fp32",
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    loader: str = "auto",
    workers: int = 4,
    device: str = "auto",
    watch: Watch | None = None,
    progress: Progress = quiet,
) -> metrics.Evaluation:
    """Measure a classifier on every image of a set, image by image; with a `teacher`, how often the two agree.

    `model` is a model, a folder that linvit saved or a timm name; `data` a name, a folder or a tar of images, or an
    opened set. Of a set with splits the validation split is meant unless `split` says otherwise; of one without, what
    the model's training held out, or all.
    """
    config = Config(batch_size=batch, precision=precision)
    processes = make_processes(config, device)
    note = partial(tell, processes, watch)
    images = open_set(model, data, split, root, note) if isinstance(data, str | Path) else data
    if not images.labelled and teacher is None:
        raise LinvitError(
            f"{images.name} has no labels: put images in CLASS folders, or give --teacher to compare with"
        )
    built = model if isinstance(model, nn.Module) else open_model(str(model), pretrained=pretrained, args=model_args)
    built.to(processes.device)
    preprocessing, outputs = Preprocessing.of(built, size), outputs_of(built)
    if size is not None:
        check_size(built, preprocessing.size, len(preprocessing.mean))
    images = match_classes(images, built, outputs)
    note(images.note)
    asked = None
    if teacher is not None:
        guide = teacher if isinstance(teacher, nn.Module) else open_teacher(teacher)
        check_teacher(guide, built)
        check_teacher_size(guide, preprocessing.size, len(preprocessing.mean))
        asked = Teacher(guide.to(processes.device), student=built, precision=processes.precision)
    sets = Sets(images, loader=loader, workers=workers, progress=progress)
    source = sets.source(images, preprocessing, outputs, config, processes)
    with processes.autocast():
        found = metrics.evaluate(built, source, classes=images.classes, teacher=asked, labelled=images.labelled)
    if found.broken:
        some = f"{found.broken:,} of {len(found.labels):,} images"
        raise LinvitError(
            f"{described(model)} gives NaN or infinite outputs for {some}: try --precision fp32, or train it again"
        )
    return found


def open_set(model: Model, data: str | Path, split: str, root: str | Path | None, note: Note) -> Split:
    """The split that is meant."""
    images = open_split(data, split or "auto", root=root, unlabelled=True)
    if split or not undivided(images):
        return images
    if was_held_out(model, len(images)):
        return open_split(data, "validation", root=root, unlabelled=True)
    note(f"{data} has no splits: all {len(images):,} images are measured")
    return images


def was_held_out(model: Model, images: int) -> bool:
    """Whether the model is from a training that held out a part of a set of so many images."""
    if isinstance(model, nn.Module):
        return (getattr(model, "pretrained_cfg", None) or {}).get("held_out_of") == images
    return Path(model).is_dir() and read_config(Path(model)).held_out_of == images
