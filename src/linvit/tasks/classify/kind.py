"""Classification, as `linvit.train` and `linvit.evaluate` ask for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from linvit.conversion import Plan
from linvit.conversion.saving import noted
from linvit.errors import LinvitError
from linvit.tasks.classify.checks import check_size, check_teacher_size, match_classes, outputs_of
from linvit.tasks.classify.data import Split, open_data, open_split, undivided
from linvit.tasks.classify.fitting import Classification, ClassifierFitting, Sets
from linvit.tasks.classify.metrics import Evaluation
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.kinds import Kind, Model, Note, Reading, is_name, others_config, saved_config, start_model
from linvit.training import Config, Processes
from linvit.training.objectives.teacher import check_teacher, open_teacher


class Classify(Kind):
    task = "classify"
    batch = 256

    def open_sets(self, data: Any, reading: Reading) -> Sets:
        opened = open_data(data, root=reading.root, unlabelled=True) if isinstance(data, str | Path) else data
        return Sets(opened[0], opened[1], reading.loader, reading.workers, reading.progress)

    def settle(self, config: Config, sets: Sets, settings: list[str], note: Note) -> Config:
        """The recipe for a set that has no labels: what asked for them asks the teacher, unless the user set its
        share."""
        asked = any(setting.partition("=")[0].strip() == "distillation_weight" for setting in settings)
        if sets.train.labelled or not config.needs_labels or config.distillation == "none" or asked:
            return config
        note(f"{sets.train.name} has no labels: the teacher's answers are all there is to learn")
        return replace(config, distillation_weight=1.0)

    def start(self, model: Model, sets: Sets, config: Config, *, pretrained: bool, args: dict[str, Any]) -> nn.Module:
        theirs = is_name(model) or others_config(model)
        if theirs and sets.train.class_count is not None:
            args.setdefault("num_classes", sets.train.class_count)
        return start_model(model, config.seed, pretrained=pretrained, args=args)

    def check_original(self, original: Any, model: Model, sets: Sets, plan: Plan, pretrained: bool, note: Note) -> None:
        """Whether an original has answers to learn from: for another number of classes its classifier is new."""
        theirs = others_config(model)
        if not (is_name(model) or theirs):
            return
        if not pretrained:
            note("the teacher, the original, has random weights: train it first, or give --teacher")
            return
        outputs, labels = outputs_of(original), theirs.get("id2label")
        known = len(labels) if labels else noted(original).get("num_classes")
        if known is None or known == outputs:
            return
        first = f"linvit train {model} --data {sets.train.name} --recipe finetune -o runs/original"
        then = f"linvit train runs/original/best --data {sets.train.name} --plan {plan.name} …"
        new = f"{model} has not learnt these {outputs} classes and cannot teach them"
        raise LinvitError(f"{new}: train it first ({first}) and convert that ({then}), or give --teacher")

    def fit(self, model: nn.Module, sets: Sets, config: Config, **how: Any) -> ClassifierFitting:
        return ClassifierFitting(model, sets, config, **how)

    def open_split(self, model: Model, data: Any, split: str, reading: Reading, note: Note) -> Split:
        """The split that is meant: of a set that has none, what the model's training held out of so many images."""
        if not isinstance(data, str | Path):
            return data
        images = open_split(data, split or "auto", root=reading.root, unlabelled=True)
        if split or not undivided(images):
            return images
        if isinstance(model, nn.Module):
            held_out_of = noted(model).get("held_out_of")
        else:
            ours = saved_config(model)
            held_out_of = None if ours is None else ours.held_out_of
        if held_out_of == len(images):
            return open_split(data, "validation", root=reading.root, unlabelled=True)
        note(f"{data} has no splits: all {len(images):,} images are measured")
        return images

    def evaluate(
        self,
        model: nn.Module,
        images: Split,
        *,
        teacher: Model | None,
        size: int | None,
        config: Config,
        processes: Processes,
        reading: Reading,
        note: Note,
    ) -> Evaluation:
        preprocessing, outputs = Preprocessing.of(model, size), outputs_of(model)
        if size is not None:
            check_size(model, preprocessing.size, len(preprocessing.mean))
        images = match_classes(images, model, outputs)
        note(images.note)
        guide = teacher if teacher is None or isinstance(teacher, nn.Module) else open_teacher(teacher)
        if guide is not None:
            check_teacher(guide, model)
            check_teacher_size(guide.to(processes.device), preprocessing.size, len(preprocessing.mean))
        sets = Sets(images, loader=reading.loader, workers=reading.workers, progress=reading.progress)
        source = sets.source(images, preprocessing, outputs, config, processes)
        with processes.autocast():
            found = Classification(images, source, processes).evaluate(model, guide)
        if found.broken:
            broken = f"NaN or infinite outputs for {found.broken:,} of {len(found.labels):,} images"
            raise LinvitError(f"the model gives {broken}: try --precision fp32, or train it again")
        return found
