"""Train and judge a detector or segmenter: data, recipe and teacher brought together for the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.conversion.saving import label_names, note, noted
from linvit.errors import LinvitError
from linvit.images import Progress, quiet
from linvit.models.backbones.adapter import Adapter
from linvit.models.dense import DenseModel, Target
from linvit.tasks.dense.loading import Batch, DenseSource
from linvit.tasks.dense.samples import Samples, match_categories
from linvit.tasks.dense.transforms import TransformSettings, label_map, to_original
from linvit.tasks.detect.metrics import DetectionMeter, DetectionMetrics
from linvit.tasks.fitting import Fitting
from linvit.tasks.segment.metrics import SegmentationMeter, SegmentationMetrics
from linvit.training import Config, Outcome, Output, Phase, Processes, Task, make_processes
from linvit.training.drop_path import set_drop_path
from linvit.training.engine.phases import repeatable
from linvit.training.objectives.stages import make_dense_phases

BEST = {"detect": "mAP", "segment": "mIoU"}
MODES = {"square": "squash", "longest": "border", "shortest": "center"}  # timm's words for how images are resized
# Of images that are resized by their shorter side, the longer one at most: as on COCO and on ADE20K.
LONGEST = {"detect": 1333 / 800, "segment": 2048 / 512}
Metrics = DetectionMetrics | SegmentationMetrics


@dataclass(frozen=True)
class DenseSets:
    """What a run learns from and is validated on, and with how many workers they are read."""

    train: Samples
    validation: Samples | None = None
    workers: int = 0
    progress: Progress = quiet


class DenseTask(Task):
    """The best weights have the highest mAP or mIoU, in the pixels of the original images."""

    def __init__(self, task: str, samples: Samples | None, source: DenseSource | None, processes: Processes) -> None:
        self.task, self.samples, self.source, self.processes = task, samples, source, processes
        self.best = BEST[task] if samples is not None else ""
        self.latest: tuple[list[Any], Metrics] | None = None  # which weights the training was judged by last, and how

    def evaluate(self, model: nn.Module) -> Metrics:
        if self.samples is None or self.source is None:
            raise LinvitError("there is no validation set to evaluate on")
        meter = self.meter(model)
        for images, targets in self.source.epoch(0):
            answers = list(zip(model(images, targets), targets, strict=True))
            if isinstance(meter, SegmentationMeter):
                meter.add([label_map(*each) for each in answers], [target["labels"] for target in targets])
                continue
            for answer, target in answers:
                meter.add([to_original(answer, target)], [{**target, "size": target["original"]}])
        for rank, state in enumerate(self.processes.gather_objects(meter.state())):
            if rank != self.processes.rank:
                meter.merge(state)
        return meter.compute()

    def meter(self, model: nn.Module) -> DetectionMeter | SegmentationMeter:
        assert self.samples is not None
        names = self.samples.categories
        return (
            DetectionMeter(names, bool(getattr(model, "masks", False)))
            if self.task == "detect"
            else SegmentationMeter(names)
        )

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        found = self.evaluate(model)
        self.latest = versions(model), found
        return found.metrics()

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(*batch)

    def resize(self, batch: Batch, size: int) -> Batch:
        """The batch at another size, its boxes and masks with it."""
        images, targets = batch
        if images.shape[-1] == size == images.shape[-2]:
            return batch
        factors = torch.tensor([size / images.shape[-2], size / images.shape[-1]])
        smaller = F.interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False)
        return smaller, [resize_target(target, factors, size) for target in targets]


def versions(model: nn.Module) -> list[Any]:
    """Which tensors a model's weights are, and how often each was written."""
    return [(id(tensor), tensor._version) for tensor in (*model.parameters(), *model.buffers())]


def resize_target(target: Target, factors: Tensor, size: int) -> Target:
    """A training target of an image that was resized by these factors, height's and width's."""
    found = {**target, "size": (target["size"] * factors.to(target["size"].device)).round().long().clamp(1, size)}
    if "boxes" in target:
        found["boxes"] = target["boxes"] * factors.flip(0).repeat(2).to(target["boxes"].device)
        if "masks" in target:
            found["masks"] = nearest(target["masks"], size)
    else:
        found["labels"] = nearest(target["labels"][None], size)[0]
    return found


def nearest(maps: Tensor, size: int) -> Tensor:
    """Maps `(n, height, width)` of whole numbers at another size."""
    if not len(maps):
        return maps.new_zeros(0, size, size)
    return F.interpolate(maps[None].float(), (size, size), mode="nearest-exact")[0].to(maps.dtype)


class DenseFitting(Fitting):
    """A detector or segmenter, annotated images and a recipe. Runs in one process can share `phases`, as classifiers
    can."""

    judged: tuple[list[Any], Metrics] | None = None  # the weights that a run ended with, and how good they are

    def __init__(
        self,
        model: DenseModel,
        sets: DenseSets,
        config: Config,
        *,
        teacher: nn.Module | None = None,
        processes: Processes | None = None,
        output: Output | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        processes = processes or make_processes(config)
        super().__init__(config, processes, output)
        train, validation = match_names(model, sets)
        settings = settings_of(model, config)
        model.to(processes.device)
        if teacher is not None:
            teacher.to(processes.device)
        if phases is None:
            self.prepare_model(model)
            phases = make_dense_phases(config, model, teacher)
        self.phases = phases
        for split in (train, validation):
            self.note(split.note if split is not None else "")
        batch = config.batch_size // (processes.world * config.accumulate)
        place: dict[str, Any] = {"device": processes.device, "workers": sets.workers, "seed": config.seed}
        place |= {"rank": processes.rank, "world": processes.world, "progress": sets.progress}
        self.source = DenseSource(train, settings, batch, training=True, **place)
        self.checks = None
        if validation is not None:
            self.checks = DenseSource(validation, settings, batch, training=False, **place)
        self.task = DenseTask(model.task, validation, self.checks, processes)
        note(model, input_size=(3, settings.size, settings.size), crop_pct=1.0, crop_mode=MODES[settings.resize])
        splits, names = (train, validation), label_names(model)
        self.assemble(model, self.task, splits, classes=names, loaders=["dense"], teacher=teacher)

    def prepare_model(self, model: Any) -> None:
        """The extractors of an adapter have the whole of the recipe's drop path each, as in its authors' code; over
        several GPUs batch norm sees the images of all, of which each has few."""
        super().prepare_model(model)
        if isinstance(model.backbone.pyramid, Adapter):
            set_drop_path(model.backbone.pyramid.extractors, self.config.drop_path, rule="constant")
        if self.processes.world > 1 and self.processes.device.type == "cuda":
            convert_sync_batchnorm(model)

    def run(self, *, resume: bool = False) -> Outcome:
        self.judged = self.task.latest = None
        outcome = super().run(resume=resume)
        self.judged = self.task.latest
        return outcome

    def evaluate(self, model: nn.Module | None = None) -> Metrics:
        """How good the trained weights, or another model, are on the validation set, in the recipe's precision. A run
        ends in that, which is then not done twice."""
        if model is None and self.judged is not None and self.judged[0] == versions(self.shown):
            return self.judged[1]
        with repeatable(self.config.deterministic), torch.no_grad(), self.processes.autocast():
            return self.task.evaluate((model or self.shown).eval())


def match_names(model: DenseModel, sets: DenseSets) -> tuple[Samples, Samples | None]:
    """Sets labelled by the model's categories. The model is given the set's names where it has none."""
    names: Sequence[str] = label_names(model)
    if not names:
        names = sets.train.categories
        if len(names) != model.num_classes:
            raise LinvitError(
                f"{sets.train.name} has {len(names)} categories, the model {model.num_classes}: "
                f"give --model-arg num_classes={len(names)}"
            )
        note(model, label_names=tuple(names))
    train = match_categories(sets.train, names)
    return train, match_categories(sets.validation, names) if sets.validation is not None else None


def settings_of(model: DenseModel, config: Config) -> TransformSettings:
    """How images come to the model by this recipe; where it names no size, as they came in the model's training."""
    known = noted(model)
    size = config.size or known["input_size"][-1]
    resize = config.resize
    if config.size is None and resize == Config.resize:
        resize = next((name for name, word in MODES.items() if word == known.get("crop_mode")), resize)
    return TransformSettings(
        size=size,
        resize=resize,
        longest=round(LONGEST[model.task] * size) if resize == "shortest" else None,
        sizes=config.multiscale,
        scale_jitter=None if config.scale_jitter == (1.0, 1.0) else config.scale_jitter,
        flip=config.flip,
        photometric=config.photometric,
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
    )


def trained_settings(model: DenseModel, size: int | None = None) -> TransformSettings:
    """How images came to the model in its training, for judging and using it, perhaps at another size."""
    found = settings_of(model, Config())
    if size is None:
        return found
    longest = round(LONGEST[model.task] * size) if found.resize == "shortest" else None
    return replace(found, size=size, longest=longest)
