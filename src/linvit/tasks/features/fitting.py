"""Train a backbone to give its original's features: images, recipe and teacher brought together for the engine."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError
from linvit.tasks.classify import checks
from linvit.tasks.classify.data import Split
from linvit.tasks.classify.fitting import Sets
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.streaming import Streamed
from linvit.tasks.features.metrics import FeatureEvaluation, Gallery, collect, collect_both, nearest
from linvit.tasks.fitting import Fitting
from linvit.training import BatchSource, Config, Output, Phase, Processes, Task, make_processes
from linvit.training.engine.phases import repeatable
from linvit.training.objectives.final import Reader, final_features, teacher_features
from linvit.training.objectives.stages import make_phases
from linvit.training.objectives.teacher import Teacher

ANY = 2**31 - 1  # labels, where nothing has an output for each
FEW = 3  # images of which to ask who is the nearest of the others


class FeatureTask(Task):
    """The best weights have the highest cosine with the original's features, whether there are labels or not. With
    `gallery`, training images as they are evaluated, kNN and probe are measured too, each time: what the teacher gives
    for those is asked once."""

    best = "cosine"

    def __init__(
        self,
        source: BatchSource | None,
        gallery: BatchSource | None = None,
        teacher: Teacher | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.source, self.gallery, self.teacher, self.reader = source, gallery, teacher, reader
        self.best = "cosine" if source is not None else ""
        self.known: Gallery | None = None  # the teacher's

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> FeatureEvaluation:
        if self.source is None:
            raise LinvitError("there is no validation set to evaluate on")
        training = model.training
        model.eval()
        found: dict[str, Any] = {}
        ask = partial(final_features, model, reader=self.reader)
        asked = None if self.teacher is None else partial(teacher_features, self.teacher, reader=self.reader)
        try:
            theirs: Gallery | None = None
            if asked is not None:
                ours, theirs, alike, broken = collect_both(ask, asked, self.source)
                patch, whole, *maps = alike.cpu().numpy().T
                found = {"patch_cosines": patch, "class_cosines": whole, "map_cosines": tuple(maps)}
                if len(ours.labels) >= FEW:
                    found["neighbours"] = (nearest(ours.features) == nearest(theirs.features)).cpu().numpy()
            else:
                ours, broken = collect(ask, self.source)
            if self.gallery is not None:
                own = collect(ask, self.gallery)[0]
                found["knn"], found["probe"] = own.judge(ours.features, ours.labels)
                if theirs is not None and asked is not None:
                    self.known = self.known or collect(asked, self.gallery)[0]
                    judged = self.known.judge(theirs.features, theirs.labels)
                    found["teacher_knn"], found["teacher_probe"] = judged
        finally:
            model.train(training)
        return FeatureEvaluation(len(ours.labels), broken=broken, **found)

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        return self.evaluate(model).metrics()


class FeatureFitting(Fitting):
    """A backbone, images and a recipe. Runs in one process can share `phases`, as classifiers can."""

    def __init__(
        self,
        model: nn.Module,
        sets: Sets,
        config: Config,
        *,
        teacher: nn.Module | None = None,
        reader: Reader | None = None,
        processes: Processes | None = None,
        output: Output | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        processes = processes or make_processes(config)
        super().__init__(config, processes, output)
        train, validation = sets.train, sets.validation
        preprocessing = Preprocessing.of(model, config.size or max(config.sides, default=None), config.test_crop)
        model.to(processes.device)
        check_recipe(config)
        if phases is None:
            self.prepare(model, teacher, preprocessing)
            phases = make_phases(config, model, teacher, labelled=False, reader=reader)
        self.phases = phases
        if validation is not None:
            self.note(validation.note)
        place = (preprocessing, train.class_count or ANY, config, processes)
        self.source = sets.source(train, *place, Augmentation.of(config))
        if isinstance(self.source, Streamed):
            self.note(self.source.note)
        self.checks = sets.source(validation, *place) if validation is not None else None
        self.gallery = sets.source(train, *place) if known_labels(train, validation) else None
        asked = None if teacher is None else Teacher(teacher, student=model, precision=processes.precision)
        self.task = FeatureTask(self.checks, self.gallery, asked, reader)
        loaders = [type(source).__name__.lower() for source in (self.source, self.checks) if source is not None]
        if self.output.models:
            note(model, crop_pct=preprocessing.crop, input_size=(len(preprocessing.mean), *preprocessing.size))
            note(model, held_out_of=validation.held_out_of if validation is not None else 0)
        self.assemble(
            model, self.task, (train, validation), classes=label_names(model), loaders=loaders, teacher=teacher
        )

    def prepare(self, model: nn.Module, teacher: nn.Module | None, preprocessing: Preprocessing) -> None:
        """Bring the model into the recipe's form, and see that it, the teacher and the recipe go together."""
        self.prepare_model(model)
        channels, sides = len(preprocessing.mean), {(side, side) for side in self.config.sides}
        for shape in {preprocessing.size, *sides}:
            checks.check_size(model, shape, channels)
            if teacher is not None:
                checks.check_teacher_size(teacher.to(self.processes.device), shape, channels)

    def evaluate(self, model: nn.Module | None = None) -> FeatureEvaluation:
        """What the trained weights, or another model, are worth on the validation set, in the recipe's precision."""
        with repeatable(self.config.deterministic), torch.no_grad(), self.processes.autocast():
            return self.task.evaluate(model or self.shown)

    def close_sources(self) -> None:
        super().close_sources()
        close: Any = getattr(self.gallery, "close", None)
        if close is not None:
            close()


def known_labels(train: Split, validation: Split | None) -> bool:
    """Whether kNN and probe can be measured."""
    return validation is not None and train.labelled and validation.labelled


def check_recipe(config: Config) -> None:
    """Whether a recipe learns features, and nothing that takes labels or logits."""
    odd = next((stage.name for stage in config.plan_of_stages() if stage.objective == "supervised"), "")
    if odd or config.distillation != "none" or any(stage.logits for stage in config.stages):
        what = f"stage {odd} learns answers" if odd else "distillation and logits are of classifiers"
        raise LinvitError(f"task features learns the original's features, and {what}: leave it out, or choose fast")
