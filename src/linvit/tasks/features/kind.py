"""Features of backbones, as `linvit.train` and `linvit.evaluate` ask for them."""

import inspect
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from linvit.conversion import Plan
from linvit.conversion.dry_run import image_part
from linvit.conversion.rebuilding import hugging
from linvit.errors import LinvitError
from linvit.tasks.classify.checks import check_size, check_teacher_size
from linvit.tasks.classify.data import Images, Split, hold_out, open_split, undivided
from linvit.tasks.classify.fitting import Sets
from linvit.tasks.classify.kind import Classify
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.classify.readers import SPLITS
from linvit.tasks.features.fitting import ANY, FeatureFitting, FeatureTask, check_recipe, known_labels
from linvit.tasks.features.metrics import FeatureEvaluation
from linvit.tasks.kinds import Model, Note, Reading, is_name, start_model
from linvit.training import Config, Processes
from linvit.training.objectives.teacher import Teacher, open_teacher


class Backbones(Classify):
    """Images are read as classifiers read them; their labels are for judging only."""

    task = "features"
    batch = 128

    def settle(self, config: Config, sets: Sets, settings: list[str], note: Note) -> Config:
        check_recipe(config)
        return config

    def start(self, model: Model, sets: Sets, config: Config, *, pretrained: bool, args: dict[str, Any]) -> nn.Module:
        """A timm model comes without its classifier, a folder or a module as it is, one that reads text too without
        what does."""
        if is_name(model):
            args.setdefault("num_classes", 0)
        return tower(start_model(model, config.seed, pretrained=pretrained, args=args))

    def check_original(self, original: Any, model: Model, sets: Sets, plan: Plan, pretrained: bool, note: Note) -> None:
        if is_name(model) and not pretrained:
            note("the teacher, the original, has random weights: give a trained one, or --teacher")

    def fit(self, model: nn.Module, sets: Sets, config: Config, **how: Any) -> Any:
        guide = how.pop("teacher", None)
        return FeatureFitting(model, sets, config, teacher=None if guide is None else tower(guide), **how)

    def open_split(self, model: Model, data: Any, split: str, reading: Reading, note: Note) -> Any:
        """The images to measure, and where they have labels the training images that kNN and probe are made from. A
        labelled set without splits is divided for that, as training does it."""
        if not isinstance(data, str | Path):
            return sets_of(*data) if isinstance(data, tuple | list) else sets_of(None, data)
        images: Split = super().open_split(model, data, split, reading, note)
        if split in (*SPLITS["train"], "all") or not images.labelled:
            return sets_of(None, images)
        if isinstance(images, Images) and undivided(images):
            return sets_of(*hold_out(images))
        train = open_split(data, "train", root=reading.root, unlabelled=True)
        return sets_of(train, images)

    def evaluate(
        self,
        model: nn.Module,
        images: Any,
        *,
        teacher: Model | None,
        size: int | None,
        config: Config,
        processes: Processes,
        reading: Reading,
        note: Note,
    ) -> Any:
        sets: Sets = replace(images, loader=reading.loader, workers=reading.workers, progress=reading.progress)
        model = tower(model)
        split, preprocessing = sets.validation, Preprocessing.of(model, size)
        assert split is not None
        labelled = sets.train is not split and known_labels(sets.train, split)
        if teacher is None and not labelled:
            lacking = "has no labels" if not split.labelled else "has no training images beside it"
            hint = "put images in CLASS folders, or give --teacher for cosines and neighbours"
            raise LinvitError(f"{split.name} {lacking}, which kNN and probe need: {hint}")
        note(split.note)
        channels = len(preprocessing.mean)
        check_size(model, preprocessing.size, channels)
        asked = None
        if teacher is not None:
            guide = tower(teacher if isinstance(teacher, nn.Module) else open_teacher(teacher))
            check_teacher_size(guide.to(processes.device), preprocessing.size, channels)
            asked = Teacher(guide, student=model, precision=processes.precision)
        place = (preprocessing, sets.train.class_count or ANY, config, processes)
        source = sets.source(split, *place)
        gallery = sets.source(sets.train, *place) if labelled else None
        with processes.autocast():
            found: FeatureEvaluation = FeatureTask(source, gallery, asked).evaluate(model)
        if found.broken:
            broken = f"NaN or infinite features for {found.broken:,} of {found.images:,} images"
            raise LinvitError(f"the model gives {broken}: try --precision fp32, or train it again")
        return found


def tower(model: Any) -> nn.Module:
    """The model, or of one of Hugging Face's that reads text or prompts too the part that sees, with what is noted on
    the whole, where that is a model of its own."""
    part = image_part(model) if hugging(model) else model
    if "spatial_shapes" in inspect.signature(part.forward).parameters:
        kind = type(part).__name__
        raise LinvitError(f"{kind} takes patches, and pictures are fed here: take one of one size, or your own loop")
    if part is model or not hasattr(import_module("transformers"), type(part).__name__):
        return model
    for name in ("linvit_source", "linvit_processor", "pretrained_cfg", "default_cfg"):
        if hasattr(model, name):
            setattr(part, name, getattr(model, name))
    return part


def sets_of(train: Split | None, validation: Split) -> Sets:
    """Images to measure, and those to measure them by, where there are some."""
    return Sets(train or validation, validation)
