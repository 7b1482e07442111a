"""Detection and segmentation, as `linvit.train` and `linvit.evaluate` ask for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.conversion import Plan, load, open_model
from linvit.conversion.rebuilding import origin
from linvit.conversion.saving import label_names
from linvit.errors import LinvitError
from linvit.models.dense import HEADS, DenseModel
from linvit.tasks.dense.fitting import DenseFitting, DenseSets, DenseTask, Metrics, trained_settings
from linvit.tasks.dense.loading import DenseSource
from linvit.tasks.dense.readers import open_dense, open_dense_split
from linvit.tasks.dense.samples import Samples, match_categories
from linvit.tasks.kinds import Kind, Model, Note, Reading, described, head_of, is_name, start_model
from linvit.training import Config, Processes

OF_THE_HEAD = ("num_classes", "global_pool", "features_only", "out_indices")  # arguments that a trunk has no use for


class Dense(Kind):
    """`detect` or `segment` by a head, which a classifier becomes the trunk of; `pyramid` is how."""

    batch = 16

    def __init__(self, task: str, head: str, pyramid: str = "") -> None:
        self.task, self.head, self.pyramid = task, head, pyramid or "auto"
        self.masks = HEADS[head].masks

    def open_sets(self, data: Any, reading: Reading) -> DenseSets:
        check_loader(reading)
        opened = (
            open_dense(data, self.task, masks=self.masks, root=reading.root) if isinstance(data, str | Path) else data
        )
        return DenseSets(opened[0], opened[1], reading.workers, reading.progress)

    def settle(self, config: Config, sets: DenseSets, settings: list[str], note: Note) -> Config:
        """The recipe for photographs that nobody annotated: what aligns with the original is all there is."""
        kept = tuple(stage for stage in config.stages if stage.objective != "supervised")
        if sets.train.labelled or kept == config.stages != ():
            return config
        if not kept:
            hint = "give a set in COCO's, PASCAL VOC's or ADE20K's format, or --recipe fast and --plan"
            raise LinvitError(f"{sets.train.name} has no annotations to learn from: {hint}")
        gone = ", ".join(stage.name for stage in config.stages if stage not in kept)
        note(f"{sets.train.name} has no annotations: stage {gone} is left out, and nothing is judged")
        return replace(config, stages=kept, epochs=sum(stage.epochs for stage in kept))

    def start(
        self, model: Model, sets: DenseSets, config: Config, *, pretrained: bool, args: dict[str, Any]
    ) -> nn.Module:
        classes = len(sets.train.categories)
        if head_of(model):
            if is_name(model):
                args.setdefault("num_classes", classes)
            return start_model(model, config.seed, pretrained=pretrained, args=args)
        around: dict[str, Any] = {"pyramid": self.pyramid, "num_classes": classes}
        torch.manual_seed(config.seed)
        if is_name(model):
            return open_model(
                self.head, pretrained=pretrained, args={"backbone": str(model), "backbone_args": args, **around}
            )
        trunk = model if isinstance(model, nn.Module) else load(model)
        name, built = origin(trunk)
        kept = {key: value for key, value in built.items() if key not in OF_THE_HEAD}
        found: Any = open_model(self.head, pretrained=False, args={"backbone": name, "backbone_args": kept, **around})
        found.backbone.load_trunk(trunk)
        return found

    def check_original(self, original: Any, model: Model, sets: Any, plan: Plan, pretrained: bool, note: Note) -> None:
        """A head that was made just now has nothing to teach."""
        if head_of(model) and not is_name(model):
            return
        first = f"linvit train {described(model)} --head {self.head} --data … --recipe finetune -o runs/original"
        then = f"linvit train runs/original/best --data … --plan {plan.name} -o runs/{plan.name}"
        raise LinvitError(
            f"the head on {described(model)} has learnt nothing yet: train it first ({first}) and convert that ({then})"
        )

    def fit(self, model: Any, sets: DenseSets, config: Config, **how: Any) -> DenseFitting:
        return DenseFitting(model, sets, config, **how)

    def open_split(self, model: Model, data: Any, split: str, reading: Reading, note: Note) -> Samples:
        check_loader(reading)
        if not isinstance(data, str | Path):
            return data
        return open_dense_split(data, self.task, split or "validation", masks=self.masks, root=reading.root)

    def evaluate(
        self,
        model: nn.Module,
        images: Samples,
        *,
        teacher: Model | None,
        size: int | None,
        config: Config,
        processes: Processes,
        reading: Reading,
        note: Note,
    ) -> Metrics:
        if not isinstance(model, DenseModel):
            raise LinvitError(f"{type(model).__name__} does not {self.task}: give a model that was trained to")
        if teacher is not None:
            raise LinvitError("agreement with a teacher is of classifiers: leave --teacher out")
        names = label_names(model)
        images = match_categories(images, names) if names else images
        note(images.note)
        place: dict[str, Any] = {"rank": processes.rank, "world": processes.world, "device": processes.device}
        settings = trained_settings(model, size)
        source = DenseSource(images, settings, config.batch_size, training=False, workers=reading.workers, **place)
        try:
            with torch.no_grad(), processes.autocast():
                return DenseTask(self.task, images, source, processes).evaluate(model.eval())
        finally:
            source.close()


def check_loader(reading: Reading) -> None:
    if reading.loader == "resident":
        raise LinvitError("annotated images are read as they are needed: leave --loader resident out")
