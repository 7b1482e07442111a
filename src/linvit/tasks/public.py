"""Train a model by a recipe, and measure what it gets right: `linvit.train` and `linvit.evaluate`, for every task."""

import copy
import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from linvit.conversion import Plan, Report, convert, open_model, open_original, parse_plan
from linvit.conversion.convert import names_to_drop
from linvit.conversion.plan import Auto
from linvit.conversion.resolving import resolve
from linvit.errors import LinvitError
from linvit.files import place, write_json
from linvit.images import Progress, quiet
from linvit.tasks.kinds import Model, Note, Reading, check_data, described, kind_of, name_of, tell
from linvit.training import Config, Outcome, Output, Processes, make_processes, override
from linvit.training import recipe as named_recipe
from linvit.training.checkpoints import Watch, resumes_after
from linvit.training.loggers import Logger, RunFacts, find_logger, logging_to
from linvit.training.objectives.final import Reader
from linvit.training.objectives.teacher import open_teacher


@dataclass
class Trained(Outcome):
    """How a training ended, the model with the weights that were evaluated, and what its conversion did."""

    model: nn.Module | None = field(default=None, repr=False)
    report: Report | None = None


def train(
    model: Model,
    data: Any,
    recipe: str | Config = "fast",
    *,
    task: str = "",
    head: str = "",
    pyramid: str = "",
    plan: str | Plan | None = None,
    options: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    teacher: Model | None = None,
    output: str | Path | None = None,
    size: int | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    loader: str = "auto",
    workers: int = 4,
    device: str = "auto",
    watch: Watch | None = None,
    logger: str | Logger | None = None,
    reader: Reader | None = None,
    progress: Progress = quiet,
) -> Trained:
    """Train a model by a recipe, in place; with a `plan`, convert it first and learn from the original.

    `model` is a model, a timm name or a folder that linvit saved; `data` a name, a folder or a tar of images, or an
    opened training and validation set. `settings` change the recipe, as `["lr=1e-3"]` or `{"lr": 1e-3}`. What a recipe
    learns from is the `teacher`, else its own, else the model before its conversion. Images without labels are learnt
    from it alone.

    To `detect` or `segment`, a classifier becomes the trunk of a model with this `head`, by this `pyramid` where it is
    a plain ViT; a detector or segmenter is trained as it is. See docs/dense.md. With the task `features` a model
    without a classifier learns the final features of its original, from any images; with a `reader`, a function of its
    maps such as the neck of a segmenter, what that makes of them. See docs/features.md.

    In `output` the run is logged and kept in checkpoints, from which it goes on with `resume`, and ends in the models
    `last` and `best`. With `ema` the averaged weights are those that are evaluated and given; `model` keeps its own.
    Every record of the log goes to `watch`, and to the `logger`: `wandb`, or a function of yours, itself or as
    `module:function`, that is given the run's facts and returns a function of a record.
    """
    settings, drop, folder = listed(settings), list(drop), None if output is None else place(output)
    kind = kind_of(model, task, head, pyramid)
    reading = {} if reader is None else {"reader": reader}
    if reading and kind.task != "features":
        raise LinvitError(f"a reader is of the task features, and this one is to {kind.task}: leave it out")
    config = named_recipe(recipe, name_of(model), kind.task) if isinstance(recipe, str) else recipe
    config = override(config, settings)
    if size is not None:
        config = replace(config, size=size)
    chosen = parse_plan(plan, **(options or {})) if isinstance(plan, str) else plan
    if plan is None and (options or drop):
        raise LinvitError("--option, --keep and --drop are of a conversion: give --plan too, or leave them out")
    if folder is not None and folder.is_file():
        raise LinvitError(f"{folder} is a file: give a folder")
    logger = find_logger(logger) if logger else None  # a mistake is told before the work
    processes = make_processes(config, device)
    note = partial(tell, processes, watch)
    check_data(data, sets=2)
    sets = kind.open_sets(data, Reading(root, loader, workers, progress))
    config = kind.settle(config, sets, settings, note)
    if teacher is not None and not config.needs_teacher:
        useless = f"recipe {config.recipe} has no use for a teacher"
        raise LinvitError(f"{useless}: set distillation=soft, or leave --teacher out")
    args = dict(model_args or {})
    built = kind.start(model, sets, config, pretrained=pretrained, args=args)
    guide = None
    if config.needs_teacher:
        guide = find_teacher(teacher or config.teacher, built, model, chosen, note)
        if teacher is None and config.teacher is None and chosen is not None:
            kind.check_original(built, model, sets, chosen, pretrained, note)
    if resume and folder is not None and not (folder / "checkpoints").exists():
        note(f"there is nothing to resume in {folder}: begun anew")
    if isinstance(chosen, Auto):
        chosen = measured_plan(chosen, built, drop, config.size, processes, folder, resume)
    report = convert(built, chosen, drop=drop) if chosen is not None else None
    for line in report.losses if report is not None else ():
        note(line)
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in (options or {}).items()}
    option = [f"{name}={value}" for name, value in words.items()] or None
    identity = {"model": described(model), "args": args, "plan": described(plan), "option": option}
    identity |= {"drop": ",".join(drop), "teacher": described(teacher), "pretrained": pretrained}
    facts = RunFacts(folder, config.to_dict(), resume and folder is not None and resumes_after(folder) is not None)
    with logging_to(logger, facts, watch) if processes.first else nullcontext() as heard:
        where = Output(folder, heard, identity)
        fitting = kind.fit(built, sets, config, teacher=guide, processes=processes, output=where, **reading)
        try:
            outcome = fitting.run(resume=resume)
        finally:
            fitting.close()
    return Trained(**vars(outcome), model=fitting.shown, report=report)


def listed(settings: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Settings as `--set` takes them."""
    if not isinstance(settings, Mapping):
        return list(settings)

    def text(value: Any) -> str:
        return ",".join(map(text, value)) if isinstance(value, list | tuple) else str(value)

    return [f"{name}={text(value)}" for name, value in settings.items()]


def measured_plan(
    plan: Auto,
    model: nn.Module,
    drop: Iterable[str],
    side: int | None,
    processes: Processes,
    folder: Path | None,
    resume: bool,
) -> Plan:
    """What `auto` becomes at the size of the training, measured once by the first process and kept in the run's folder:
    the other processes, and the run when it is resumed, must convert the same layers."""
    kept, found = None if folder is None else folder / "plan.json", None
    if processes.first and resume and kept is not None and kept.exists():
        found = parse_plan(str(kept))
    elif processes.first:
        size = None if side is None else (side, side)
        found, _ = resolve(model, plan, names_to_drop(drop), size, processes.device)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, found.to_dict())
    chosen: Plan = processes.broadcast_object(found)
    return chosen


def evaluate(
    model: Model,
    data: Any,
    *,
    task: str = "",
    teacher: Model | None = None,
    size: int | None = None,
    split: str = "",
    batch: int | None = None,
    precision: str = "fp32",
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    loader: str = "auto",
    workers: int = 4,
    device: str = "auto",
    watch: Watch | None = None,
    progress: Progress = quiet,
) -> Any:
    """Measure a model on every image of a set: a classifier image by image and, with a `teacher`, how often the two
    agree; a detector by COCO's metrics, a segmenter by its mIoU; the features of a backbone by their cosines with a
    teacher's and, with labels, by kNN and a probe.

    `model` is a model, a folder that linvit saved or a timm name; `data` a name, a folder or a tar of images, or an
    opened set. Of a set with splits the validation split is meant unless `split` says otherwise; of one without, what
    the model's training held out, or all. `batch` images are looked at together, as many as suit the task unless told.
    """
    kind = kind_of(model, task)
    config = Config(batch_size=batch or kind.batch, precision=precision)
    processes, reading = make_processes(config, device), Reading(root, loader, workers, progress)
    note = partial(tell, processes, watch)
    check_data(data, sets=1)
    images = kind.open_split(model, data, split, reading, note)
    if not getattr(images, "labelled", True) and teacher is None:
        hint = "put images in CLASS folders, or give --teacher to compare with"
        raise LinvitError(f"{images.name} has no labels: {hint}")
    built = model if isinstance(model, nn.Module) else open_model(str(model), pretrained=pretrained, args=model_args)
    where: dict[str, Any] = {"config": config, "processes": processes, "reading": reading, "note": note}
    return kind.evaluate(built.to(processes.device), images, teacher=teacher, size=size, **where)


def find_teacher(named: Model | None, built: nn.Module, model: Model, plan: Plan | None, note: Note) -> nn.Module:
    """The named teacher, or the model itself before its conversion: as it is now, or as it was."""
    if named is not None:
        return named if isinstance(named, nn.Module) else open_teacher(named)
    if plan is not None:
        return copy.deepcopy(built)
    found = open_original(built, described(model))
    note(f"the teacher is the original that {described(model)} was made from")
    return found
