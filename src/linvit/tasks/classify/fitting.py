"""Train a classifier: data, recipe and teacher brought together for the engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError, unknown
from linvit.images import Progress, quiet
from linvit.tasks.classify import checks
from linvit.tasks.classify.data import Images, Split, Stream
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Resident, decode
from linvit.tasks.classify.streaming import Streamed
from linvit.tasks.fitting import Fitting
from linvit.training import BatchSource, Config, Output, Phase, Processes, Task, make_processes
from linvit.training.engine.phases import compiles, repeatable
from linvit.training.objectives.stages import make_phases
from linvit.training.objectives.teacher import Teacher

LOADERS = ("auto", "resident", "streamed")
SMALL = 4 * 2**30  # bytes of decoded pictures up to which a set goes to the device by itself
CHECKED = 2  # so many training batches at once in evaluation, which keeps nothing for a backward pass


@dataclass(frozen=True)
class Sets:
    """What a run learns from and is validated on, and how images get to the device. `held` are decoded sets that
    several runs in one process share; `decoder` is the streamed loader's."""

    train: Split
    validation: Split | None = None
    loader: str = "auto"
    workers: int = 0
    progress: Progress = quiet
    held: Held | None = None
    decoder: str = "auto"

    def __post_init__(self) -> None:
        if self.loader not in LOADERS:
            raise unknown("loader", self.loader, LOADERS)
        if self.workers < 0:
            raise LinvitError(f"--workers {self.workers}: give 0 or more")

    def source(
        self,
        split: Split,
        preprocessing: Preprocessing,
        classes: int,
        config: Config,
        processes: Processes,
        augmentation: Augmentation | None = None,
    ) -> BatchSource:
        """The batches of a split, on the device or streamed to it; without augmentation, for evaluation."""
        device, batch = processes.device, config.batch_size // (processes.world * config.accumulate)
        place: dict[str, Any] = {"seed": config.seed, "rank": processes.rank, "world": processes.world}
        place |= {"repeats": config.repeats, "augmentation": augmentation, "compile": compiles(config, device)}
        small = isinstance(split, Images) and 3 * len(split) * math.prod(preprocessing.size) <= SMALL
        if self.loader == "streamed" or (self.loader == "auto" and not small):
            place |= {"device": device, "workers": self.workers, "decoder": self.decoder}
            place["progress"] = self.progress
            return Streamed(split, preprocessing, batch, classes, **place)
        training = augmentation is not None
        pixels = decode(split, preprocessing, device=device, training=training, progress=self.progress, held=self.held)
        return Resident(pixels, preprocessing, batch if training else batch * CHECKED, classes, **place)


class Classification(Task):
    """The best weights have the highest top-1, or where there are no labels agree with the teacher most often."""

    def __init__(
        self, images: Split | None, source: BatchSource | None, processes: Processes, teacher: nn.Module | None = None
    ) -> None:
        self.images, self.source, self.precision, self.teacher = images, source, processes.precision, teacher
        if images is not None:
            self.best = "top1" if images.labelled else "agreement"

    def evaluate(self, model: nn.Module, teacher: nn.Module | None) -> Evaluation:
        if self.images is None or self.source is None:
            raise LinvitError("there is no validation set to evaluate on")
        asked = Teacher(teacher, student=model, precision=self.precision) if teacher is not None else None
        return evaluate(model, self.source, asked, classes=self.images.classes, labelled=self.images.labelled)

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        return self.evaluate(model, None if self.best == "top1" else self.teacher).metrics()


class ClassifierFitting(Fitting):
    """A classifier, images and a recipe. Runs in one process can share `phases`, made for this very model by a config
    that differs in its seed only, with the steps they have compiled."""

    def __init__(
        self,
        model: nn.Module,
        sets: Sets,
        config: Config,
        *,
        teacher: nn.Module | None = None,
        processes: Processes | None = None,
        output: Output | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        processes = processes or make_processes(config)
        super().__init__(config, processes, output)
        classes = checks.outputs_of(model)
        train, validation = checks.match_sets(sets.train, sets.validation, model, classes)
        checks.check_labels(config, train, validation)
        preprocessing = Preprocessing.of(model, config.size or max(config.sides, default=None), config.test_crop)
        model.to(processes.device)
        if phases is None:
            self.prepare(model, teacher, preprocessing)
            phases = make_phases(config, model, teacher, labelled=train.labelled)
        self.phases = phases
        if config.repeats > 1 and isinstance(train, Stream):
            self.note(f"{train.name} can only be read in order: no image comes {config.repeats} times in a step")
        if validation is not None:
            self.note(validation.note)
        place = (preprocessing, classes, config, processes)
        self.source = sets.source(train, *place, Augmentation.of(config))
        if isinstance(self.source, Streamed):
            self.note(self.source.note)
        self.checks = sets.source(validation, *place) if validation is not None else None
        self.task = Classification(validation, self.checks, processes, teacher)
        loaders = [type(source).__name__.lower() for source in (self.source, self.checks) if source is not None]
        if self.output.models:
            note(model, crop_pct=preprocessing.crop, input_size=(len(preprocessing.mean), *preprocessing.size))
            note(model, held_out_of=validation.held_out_of if validation is not None else 0)
        splits, names = (train, validation), label_names(model)
        self.assemble(model, self.task, splits, classes=names, loaders=loaders, teacher=teacher)

    def prepare(self, model: nn.Module, teacher: nn.Module | None, preprocessing: Preprocessing) -> None:
        """Bring the model into the recipe's form, and see that it, the teacher and the recipe go together."""
        config, device = self.config, self.processes.device
        self.prepare_model(model)
        channels, sides = len(preprocessing.mean), {(side, side) for side in config.sides}
        for shape in sides | ({preprocessing.size} if config.size or sides else set()):
            checks.check_size(model, shape, channels)
        if teacher is not None:
            teacher.to(device)
            for shape in {preprocessing.size, *sides}:
                checks.check_teacher_size(teacher, shape, channels)

    def evaluate(self, teacher: nn.Module | None = None) -> Evaluation:
        """What the trained weights get right on the validation set, in the recipe's precision."""
        with repeatable(self.config.deterministic), torch.no_grad(), self.processes.autocast():
            return self.task.evaluate(self.shown, teacher)
