"""Train a classifier by a recipe, and measure what it gets right: `linvit.train` and `linvit.evaluate`."""

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.conversion import Plan, Report, convert, open_model, open_original, parse_plan
from linvit.conversion.saving import read_config
from linvit.errors import LinvitError
from linvit.tasks.classify.checks import check_size, check_teacher_size, match_classes, outputs_of
from linvit.tasks.classify.data import Split, open_data, open_split, undivided
from linvit.tasks.classify.fitting import Classification, ClassifierFitting, Sets
from linvit.tasks.classify.metrics import Evaluation
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.classify.resident import Progress, quiet
from linvit.training import Config, Outcome, Output, Processes, make_processes, override
from linvit.training import recipe as named_recipe
from linvit.training.checkpoints import Watch
from linvit.training.objectives.teacher import check_teacher, open_teacher

Model = nn.Module | str | Path
Note = Callable[[str], None]


@dataclass
class Trained(Outcome):
    """How a training ended, the model with the weights that were evaluated, and what its conversion did."""

    model: nn.Module | None = None
    report: Report | None = None


def train(
    model: Model,
    data: str | Path | tuple[Split, Split | None],
    recipe: str | Config = "fast",
    *,
    plan: str | Plan | None = None,
    options: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    teacher: Model | None = None,
    output: str | Path | None = None,
    size: int | None = None,
    settings: Iterable[str] = (),
    resume: bool = False,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    loader: str = "auto",
    workers: int = 4,
    device: str = "auto",
    watch: Watch | None = None,
    progress: Progress = quiet,
) -> Trained:
    """Train a model by a recipe, in place; with a `plan`, convert it first and learn from the original.

    `model` is a model, a timm name or a folder that linvit saved; `data` a name, a folder or a tar of images, or an
    opened training and validation set. `settings` change the recipe, as `lr=1e-3`. What a recipe learns from is the
    `teacher`, else its own, else the model before its conversion. Images without labels are learnt from it alone.

    In `output` the run is logged and kept in checkpoints, from which it goes on with `resume`, and ends in the models
    `last` and `best`. With `ema` the averaged weights are those that are evaluated and given; `model` keeps its own.
    Every record of the log goes to `watch`.
    """
    settings, drop, folder = list(settings), list(drop), None if output is None else Path(output)
    config = override(named_recipe(recipe, name_of(model)) if isinstance(recipe, str) else recipe, settings)
    if size is not None:
        config = replace(config, size=size)
    chosen = parse_plan(plan, **(options or {})) if isinstance(plan, str) else plan
    if plan is None and (options or drop):
        raise LinvitError("--option, --keep and --drop are of a conversion: give --plan too, or leave them out")
    if folder is not None and folder.is_file():
        raise LinvitError(f"{folder} is a file: give a folder")
    processes = make_processes(config, device)
    note = partial(tell, processes, watch)
    opened = open_data(data, root=root, unlabelled=True) if isinstance(data, str | Path) else data
    sets = Sets(opened[0], opened[1], loader, workers, progress)
    config = without_labels(config, sets.train, settings, note)
    if teacher is not None and not config.needs_teacher:
        useless = f"recipe {config.recipe} has no use for a teacher"
        raise LinvitError(f"{useless}: set distillation=soft, or leave --teacher out")
    args = dict(model_args or {})
    built = start(model, pretrained, args, sets.train.class_count, config.seed)
    guide = None
    if config.needs_teacher:
        guide = find_teacher(teacher or config.teacher, built, model, chosen, note)
        if teacher is None and config.teacher is None and is_name(model) and chosen is not None:
            check_learnt(built, str(model), sets.train.name, chosen, pretrained, note)
    if resume and folder is not None and not (folder / "checkpoints").exists():
        note(f"there is nothing to resume in {folder}: begun anew")
    report = convert(built, chosen, drop=drop) if chosen is not None else None
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in (options or {}).items()}
    option = [f"{name}={value}" for name, value in words.items()] or None
    identity = {"model": described(model), "args": args, "plan": described(plan), "option": option}
    identity |= {"drop": ",".join(drop), "teacher": described(teacher), "pretrained": pretrained}
    where = Output(folder, watch if processes.first else None, identity)
    fitting = ClassifierFitting(built, sets, config, teacher=guide, processes=processes, output=where)
    try:
        outcome = fitting.run(resume=resume)
    finally:
        fitting.close()
    return Trained(**vars(outcome), model=fitting.shown, report=report)


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
) -> Evaluation:
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
        hint = "put images in CLASS folders, or give --teacher to compare with"
        raise LinvitError(f"{images.name} has no labels: {hint}")
    built = model if isinstance(model, nn.Module) else open_model(str(model), pretrained=pretrained, args=model_args)
    built.to(processes.device)
    preprocessing, outputs = Preprocessing.of(built, size), outputs_of(built)
    if size is not None:
        check_size(built, preprocessing.size, len(preprocessing.mean))
    images = match_classes(images, built, outputs)
    note(images.note)
    guide = teacher if teacher is None or isinstance(teacher, nn.Module) else open_teacher(teacher)
    if guide is not None:
        check_teacher(guide, built)
        check_teacher_size(guide.to(processes.device), preprocessing.size, len(preprocessing.mean))
    sets = Sets(images, loader=loader, workers=workers, progress=progress)
    source = sets.source(images, preprocessing, outputs, config, processes)
    with processes.autocast():
        found = Classification(images, source, processes).evaluate(built, guide)
    if found.broken:
        broken = f"NaN or infinite outputs for {found.broken:,} of {len(found.labels):,} images"
        raise LinvitError(f"{described(model)} gives {broken}: try --precision fp32, or train it again")
    return found


def open_set(model: Model, data: str | Path, split: str, root: str | Path | None, note: Note) -> Split:
    """The split that is meant: of a set that has none, what the model's training held out of so many images."""
    images = open_split(data, split or "auto", root=root, unlabelled=True)
    if split or not undivided(images):
        return images
    if isinstance(model, nn.Module):
        held_out_of = (getattr(model, "pretrained_cfg", None) or {}).get("held_out_of")
    else:
        held_out_of = None if is_name(model) else read_config(Path(model)).held_out_of
    if held_out_of == len(images):
        return open_split(data, "validation", root=root, unlabelled=True)
    note(f"{data} has no splits: all {len(images):,} images are measured")
    return images


def tell(processes: Processes, watch: Watch | None, text: str) -> None:
    """Let the user know something: `watch` hears it where there is one, else it is a warning."""
    if text and processes.first and watch is not None:
        watch({"kind": "note", "step": 0, "text": text})
    elif text and processes.first:
        warnings.warn(text, stacklevel=3)


def without_labels(config: Config, train: Split, settings: list[str], note: Note) -> Config:
    """The recipe for a set that has no labels: what asked for them asks the teacher, unless the user set its share."""
    asked = any(setting.partition("=")[0].strip() == "distillation_weight" for setting in settings)
    if train.labelled or not config.needs_labels or config.distillation == "none" or asked:
        return config
    note(f"{train.name} has no labels: the teacher's answers are all there is to learn")
    return replace(config, distillation_weight=1.0)


def is_name(model: Model) -> bool:
    """Whether this is a timm name."""
    return not isinstance(model, nn.Module) and not Path(model).is_dir()


def name_of(model: Model) -> str:
    """The name that a recipe may go by: of a saved model its own, not its folder's."""
    if isinstance(model, nn.Module):
        noted: Any = getattr(model, "linvit_origin", {})
        return str(noted.get("name") or (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or "")
    return read_config(Path(model)).model if Path(model).is_dir() else str(model)


def start(model: Model, pretrained: bool, args: dict[str, Any], classes: int | None, seed: int) -> nn.Module:
    """The model to train, with an output for each class; the seed draws the weights that are not given."""
    torch.manual_seed(seed)
    if isinstance(model, nn.Module):
        return model
    if is_name(model) and classes is not None:
        args.setdefault("num_classes", classes)
    built = open_model(str(model), pretrained=pretrained, args=args)
    if is_name(model):
        built.linvit_origin = {"name": str(model), "args": args}  # type: ignore[assignment]
    return built


def find_teacher(named: Model | None, built: nn.Module, model: Model, plan: Plan | None, note: Note) -> nn.Module:
    """The named teacher, or the model itself before its conversion: as it is now, or as it was."""
    if named is not None:
        return named if isinstance(named, nn.Module) else open_teacher(named)
    if plan is not None:
        return copy.deepcopy(built)
    found = open_original(built, described(model))
    note(f"the teacher is the original that {described(model)} was made from")
    return found


def check_learnt(original: Any, model: str, data: str, plan: Plan, pretrained: bool, note: Note) -> None:
    """Whether an original has answers to learn from: for another number of classes its classifier is new."""
    if not pretrained:
        note("the teacher, the original, has random weights: train it first, or give --teacher")
        return
    known = (getattr(original, "pretrained_cfg", None) or {}).get("num_classes")
    if known is None or known == original.num_classes:
        return
    first = f"linvit train {model} --data {data} --recipe finetune -o runs/original"
    then = f"linvit train runs/original/best --data {data} --plan {plan.name} …"
    new = f"{model} has not learnt these {original.num_classes} classes and cannot teach them"
    raise LinvitError(f"{new}: train it first ({first}) and convert that ({then}), or give --teacher")


def described(what: Model | Plan | None) -> Any:
    """A model or a plan, for the run's record."""
    if isinstance(what, Plan):
        return what.to_dict()
    return type(what).__name__ if isinstance(what, nn.Module) else str(what or "")
