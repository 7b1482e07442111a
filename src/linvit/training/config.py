"""What a recipe says, as one typed and frozen value, and how `--set field=value` changes it.

The fields are flat, so that every one of them has one name on the command line. Stages, which only `fast` has more than
one of, are reached as `stages.NAME.FIELD`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from linvit import codec
from linvit.errors import LinvitError, unknown

CHOICES = {
    "optimiser": ("adamw", "sgd", "muon"),
    "schedule": ("cosine", "constant", "step", "poly"),
    "no_decay": ("vectors", "norm_and_bias", "nothing"),
    "drop_path_rule": ("linear", "constant", "ramped"),
    "loss": ("cross_entropy", "bce"),
    "distillation": ("none", "soft", "hard", "token"),
    "train_interpolation": ("model", "random", "bilinear", "bicubic"),
    "precision": ("fp32", "bf16", "fp16"),
    "compile": ("auto", "off", "blocks", "default", "reduce-overhead", "max-autotune"),
    "objective": ("alignment", "features", "final", "supervised"),
    "inputs": ("teacher", "student"),
    "resize": ("square", "longest", "shortest"),
}
POSITIVE = (
    "lr lr_batch muon_lr added_lr trunk_lr layer_decay eps epochs batch_size repeats accumulate eval_epochs log_steps "
    "temperature poly_power scale_jitter multiscale"
)
NOT_NEGATIVE = (
    "warmup_epochs cooldown_epochs weight_decay min_lr warmup_lr clip_norm clip_value clip_agc ema_ramp colour_jitter "
    "mixup cutmix drop_path_skip mesa bn_images checkpoint_seconds logits fit features"
)
SHARES = (
    "flip erasing mixup_prob mixup_switch label_smoothing distillation_weight drop_path mesa_start sparse_anneal "
    "milestones"
)
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {  # what they must be: which, and whether one is
    "above 0": (f"{POSITIVE} test_crop size random_sizes sizes", lambda value: 0 < value < math.inf),
    "0 or more": (NOT_NEGATIVE, lambda value: 0 <= value < math.inf),
    "between 0 and 1": (SHARES, lambda value: 0 <= value <= 1),
    "0 or more and below 1": ("betas momentum", lambda value: 0 <= value < 1),
    "0 or more and below 2³¹": ("seed", lambda value: 0 <= value < 2**31),
    "above 0 and at most 1": ("crop_scale", lambda value: 0 < value <= 1),
}
RETIRED = ("sparse_empty",)  # fields of earlier results that no longer mean anything
FREE = ("log_steps", "checkpoint_seconds")  # settings that a resumed run may change


def setting(default: Any, meaning: str, **metadata: Any) -> Any:
    """A field with its meaning, for `linvit list settings`. A `sparse` one is left out of files while it has its
    default, so that what it came after keeps its digest."""
    return field(default=default, metadata={"meaning": meaning, **metadata})


@dataclass(frozen=True)
class Stage:
    """A part of the training with its own objective. Each stage has its own optimiser, warm-up and schedule."""

    name: str
    objective: str = setting(
        "supervised", "what is learnt: the original's layers, its blocks, its final features, or labels and teacher"
    )
    epochs: float = setting(1, "how long it is")
    lr: float | None = setting(None, "learning rate; the recipe's unless set")
    trainable: str = setting(
        "all", "what learns: all, attention (the hosts), mechanism (what conversion added), or a regular expression"
    )
    inputs: str = setting("teacher", "of alignment: what the layers see is the teacher's or the student's own")
    logits: float = setting(0, "of features: weight of the distance between the logits, at the recipe's temperature")
    fit: int = setting(0, "images to solve the linear maps behind converted layers on, before the stage begins")
    features: float = setting(
        0, "of supervised and final: weight of the distance between the blocks' outputs, beside the rest"
    )
    sizes: tuple[int, ...] = setting(
        (), "image sizes that the stage goes through, each for an equal part of it; none: the recipe's", sparse=True
    )

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise LinvitError(f"stage {self.name} has {self.epochs} epochs: it needs some, or leave the stage out")
        check_fields(self)


@dataclass(frozen=True)
class Config:
    """A recipe's values. `None` and 0 switch a thing off; times are in epochs, which need not be whole."""

    recipe: str = setting("custom", "its name, which is noted in results")
    seed: int = setting(0, "of the weights' start, the order of images and their augmentation")

    # The optimiser and its learning rate.
    optimiser: str = setting("adamw", "what moves the weights")
    betas: tuple[float, float] = setting((0.9, 0.999), "decay of AdamW's averages, of the gradient and of its square")
    eps: float = setting(1e-8, "of AdamW: what its denominator is at least")
    momentum: float = setting(0.9, "of sgd; Muon's is 0.95")
    muon: str = setting("all", "which matrices `muon` moves, in the words of a stage's `trainable`; the rest has AdamW")
    muon_lr: float = setting(1.0, "the rate of what Muon moves, in rates of the rest")
    added_lr: float = setting(1.0, "the rate of what conversion added and Muon does not move, in rates of the rest")
    trunk_lr: float = setting(1.0, "the rate of a dense model's trunk, in rates of the rest", sparse=True)
    layer_decay: float | None = setting(
        None, "each layer of the trunk learns at this part of the next one's rate", sparse=True
    )
    lr: float = setting(5e-4, "learning rate")
    lr_batch: int | None = setting(
        None, "images a step that lr is for, in proportion to which it grows; none: as it is"
    )
    schedule: str = setting("cosine", "how the rate falls over the training")
    milestones: tuple[float, ...] = setting(
        (), "of step: shares of the stage, after each of which the rate is a tenth", sparse=True
    )
    poly_power: float = setting(0.9, "of poly: the rate is (what is left of the training) to this power", sparse=True)
    epochs: float = setting(300, "how long it is, warm-up included, cool-down not; with stages, their sum")
    warmup_epochs: float = setting(5, "epochs over which the rate rises from warmup_lr")
    warmup_lr: float = setting(1e-6, "the rate that the warm-up begins with")
    warmup_prefix: bool = setting(
        False, "whether the cosine begins after the warm-up; else the warm-up hides its first part"
    )
    min_lr: float = setting(1e-5, "the rate that the schedule ends with")
    cooldown_epochs: float = setting(0, "epochs at min_lr, after the rest")
    weight_decay: float = setting(0.05, "how fast weights shrink, other than those that no_decay names")
    no_decay: str = setting(
        "vectors", "what has no weight decay: vectors and the model's own list, names with norm or bias, nothing"
    )
    clip_norm: float | None = setting(None, "the longest gradient, of all weights together")
    clip_value: float | None = setting(None, "the largest number in a gradient")
    clip_agc: float | None = setting(
        None, "the longest gradient of a unit, in lengths of its weights (adaptive clipping)"
    )
    ema: float | None = setting(None, "decay of the moving average of the weights, which is then evaluated and saved")
    ema_ramp: float | None = setting(None, "t of a ramp decay·(1 − exp(−step/t)); none: (1 + step)/(10 + step) at most")
    stages: tuple[Stage, ...] = setting((), "parts of the training; none: one supervised stage")

    # Steps.
    batch_size: int = setting(1024, "images a step, over all processes and accumulated parts")
    accumulate: int = setting(1, "parts that a step is computed in, to save memory")
    precision: str = setting("bf16", "of the products; weights stay in float32")
    compile: str = setting(
        "auto", "compiled by blocks, or the whole step in one of the compiler's modes; auto: blocks, on CUDA only"
    )
    cuda_graph: bool = setting(True, "on one CUDA device, a step is recorded once and started by a single call")
    deterministic: bool = setting(True, "a resumed run equals an uninterrupted one bit for bit; false may be faster")

    # Data and its augmentation.
    size: int | None = setting(None, "pixels of an image's side; the model's own unless set", key="input_size")
    random_sizes: tuple[int, ...] = setting((), "sizes, of which each step draws one")
    test_crop: float | None = setting(None, "share of the image that is evaluated; the model's own unless set")
    train_interpolation: str = setting("model", "how training images are resized; the resident loader's is bilinear")
    crop_scale: tuple[float, float] = setting((0.08, 1.0), "share of the image a random crop takes; (1, 1): no crop")
    repeats: int = setting(
        1, "how often an image comes in a step, each time varied anew; an epoch is as long, of fewer images"
    )
    flip: float = setting(0.5, "probability of a horizontal flip")
    colour_jitter: float = setting(0, "how far brightness, contrast and saturation vary")
    randaugment: str | None = setting(None, "RandAugment in timm's notation, such as rand-m9-mstd0.5-inc1")
    erasing: float = setting(0, "probability of a random rectangle of noise")
    mixup: float = setting(0, "alpha of mixup")
    cutmix: float = setting(0, "alpha of cutmix")
    mixup_prob: float = setting(1.0, "probability of mixup or cutmix in a step")
    mixup_switch: float = setting(0.5, "probability of cutmix where both are on")
    label_smoothing: float = setting(0, "share of the label that goes to all classes")
    resize: str = setting(
        "square", "dense: to a square, or keeping the aspect by the longest or the shortest side", sparse=True
    )
    multiscale: tuple[int, ...] = setting(
        (), "dense: sizes of the training, drawn image by image; none: `size`", sparse=True
    )
    scale_jitter: tuple[float, float] = setting(
        (1.0, 1.0), "dense: resized by a factor from this range, then cropped", sparse=True
    )
    photometric: bool = setting(False, "dense: brightness, contrast, saturation and hue vary", sparse=True)

    # What is learnt.
    drop_path: float = setting(0, "probability that a block is left out (stochastic depth), at its largest")
    drop_path_skip: int = setting(0, "first blocks without drop_path")
    drop_path_rule: str = setting(
        "linear", "drop_path grows over the blocks, is the same in all, or grows over them and over the training"
    )
    loss: str = setting("cross_entropy", "loss on the labels")
    distillation: str = setting(
        "none", "how the teacher is learnt from: its probabilities, its choice, or its choice by a head of its own"
    )
    teacher: str | None = setting(None, "whom to learn from; the model as it was before conversion unless set")
    distillation_weight: float = setting(0.5, "share of the loss that is the teacher's")
    temperature: float = setting(1.0, "of the softmax that student and teacher are compared by")
    mesa: float = setting(0, "weight of the loss against the moving average of the weights")
    mesa_start: float = setting(0.25, "share of the training, after the warm-up, before mesa begins")
    sparse_anneal: float = setting(
        0.2, "the last part of the training, over which Castling's softmax branch goes to nothing"
    )

    # Evaluation, log and checkpoints.
    bn_images: int = setting(0, "images to measure BatchNorm's statistics again with before an evaluation")
    eval_epochs: float = setting(1, "epochs between two evaluations")
    log_steps: int = setting(50, "steps between two lines of the log")
    checkpoint_seconds: float = setting(60, "least seconds between two checkpoints; 0: one at every step")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.crop_scale[0] > self.crop_scale[1]:
            raise LinvitError(f"crop_scale={self.crop_scale[0]},{self.crop_scale[1]}: the smaller share comes first")
        if self.scale_jitter[0] > self.scale_jitter[1]:
            raise LinvitError(f"scale_jitter={self.scale_jitter[0]},{self.scale_jitter[1]}: the smaller comes first")
        if self.schedule == "step" and not self.milestones:
            raise LinvitError(
                "schedule=step wants shares of the training after which the rate falls: set milestones=0.75,0.92"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise LinvitError(f"ema={self.ema}: the decay must lie between 0 and 1")
        if self.mesa and self.ema is None:
            raise LinvitError("mesa learns from the moving average of the weights: set ema as well")
        if sum(bool(given) for given in (self.clip_norm, self.clip_value, self.clip_agc)) > 1:
            raise LinvitError("clip by one of clip_norm, clip_value and clip_agc, not by several")
        if self.batch_size % self.accumulate:
            raise LinvitError(f"batch_size={self.batch_size} is not a multiple of accumulate={self.accumulate}")
        if self.stages and self.cooldown_epochs:
            raise LinvitError("cooldown_epochs is for a training in one stage: leave it out")
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise LinvitError("two stages have one name")
        largest = max((size for stage in self.stages for size in stage.sizes), default=0)
        if self.size is not None and largest > self.size:
            raise LinvitError(f"a stage has images of {largest} pixels, read at {self.size}: set size={largest}")

    def scaled(self, lr: float) -> float:
        """A learning rate at this batch size."""
        return lr * self.batch_size / self.lr_batch if self.lr_batch else lr

    def plan_of_stages(self) -> tuple[Stage, ...]:
        """The stages, of which there is always one."""
        return self.stages or (Stage("train", "supervised", self.epochs + self.cooldown_epochs),)

    @property
    def sides(self) -> set[int]:
        """The image sizes of the training, as far as the recipe names others than `size`."""
        return {*self.random_sizes, *(size for stage in self.stages for size in stage.sizes)}

    @property
    def needs_teacher(self) -> bool:
        aligned = any(s.objective != "supervised" or s.fit or s.features for s in self.stages)
        return self.distillation != "none" or aligned

    @property
    def needs_labels(self) -> bool:
        taught = self.distillation != "none" and self.distillation_weight == 1
        return not taught and any(stage.objective == "supervised" for stage in self.plan_of_stages())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return cast(dict[str, Any], codec.to_plain(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Config":
        """What `to_dict` gave, in this version of linvit or an earlier one."""
        return codec.from_plain(cls, {k: v for k, v in data.items() if k not in RETIRED}, "the recipe")


def check_fields(owner: Config | Stage) -> None:
    """Whether words are known, regular expressions can be read and numbers, where they are set, are of their kind."""
    for name, known in CHOICES.items():
        if getattr(owner, name, known[0]) not in known:
            raise unknown(name.replace("_", " "), getattr(owner, name), known)
    for name in ("trainable", "muon"):
        try:
            re.compile(getattr(owner, name, ""))
        except re.error as error:
            raise LinvitError(f"{name} '{getattr(owner, name)}' is no regular expression: {error}") from None
    where = f"stages.{owner.name}." if isinstance(owner, Stage) else ""
    for wanted, (names, good) in NUMBERS.items():
        for name in names.split():
            value = getattr(owner, name, None)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not good(number):
                    raise LinvitError(f"{where}{name}={number}: it must be {wanted}")


def override(config: Config, settings: Iterable[str]) -> Config:
    """The config with `field=value` settings, each read as the field's type. With stages, `epochs`
    scales them all, and a stage of 0 epochs is left out."""
    changes: dict[str, Any] = {}
    stages = {stage.name: stage for stage in config.stages}
    left_out: set[str] = set()
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise LinvitError(f"--set takes field=value, got '{setting}'")
        if name.startswith("stages."):
            _, stage, key = (*name.split(".", 2), "")[:3]
            if not stages:
                raise LinvitError(f"recipe {config.recipe} has no stages: leave out {name}, or set what it has")
            if stage not in stages:
                raise unknown(f"stage of recipe {config.recipe}", stage, stages)
            value = read(Stage, key, text)
            if key == "epochs":
                (left_out.add if value == 0 else left_out.discard)(stage)
            if stage not in left_out or key != "epochs":
                stages[stage] = replace(stages[stage], **{key: value})
        elif name in ("recipe", "stages"):
            raise LinvitError(f"{name} cannot be set: choose a recipe, or set stages.NAME.FIELD")
        else:
            changes[name] = read(Config, name, text)
    chosen = tuple(stage for name, stage in stages.items() if name not in left_out)
    if stages and not chosen:
        raise LinvitError(f"no stage of recipe {config.recipe} is left: one of {', '.join(stages)} needs some epochs")
    if chosen and "epochs" in changes:
        share = changes["epochs"] / sum(stage.epochs for stage in chosen)
        chosen = tuple(replace(stage, epochs=stage.epochs * share) for stage in chosen)
    elif chosen:
        changes["epochs"] = sum(stage.epochs for stage in chosen)
    return replace(config, **changes, stages=chosen)


def list_settings(config: Config | None = None) -> list[dict[str, Any]]:
    """Every setting by the name that `--set` takes: what it means and takes, its default and the config's value."""
    config = config or Config()
    owners: list[tuple[str, Config | Stage]] = [("", config)]
    owners += [(f"stages.{stage.name}.", stage) for stage in config.stages]
    return [
        {
            "name": where + f.name,
            "value": codec.to_plain(getattr(owner, f.name)),
            "default": codec.to_plain(codec.default_of(f)),
            "choices": list(CHOICES.get(f.name, ())),
            "takes": takes(type(owner), f.name),
            "meaning": f.metadata["meaning"],
        }
        for where, owner in owners
        for f in fields(owner)
        if f.name not in ("recipe", "name", "stages")
    ]


def takes(owner: type, name: str) -> str:
    """What a setting takes, in words."""
    if name in CHOICES:
        return f"one of {', '.join(CHOICES[name])}"
    kind, none, _ = codec.describe(codec.hints(owner)[name]).partition(" or none")
    wanted = next((wanted for wanted, (names, _) in NUMBERS.items() if name in names.split()), "")
    return ", ".join(part for part in (kind, wanted, none.strip()) if part)


def read(owner: type, name: str, text: str) -> Any:
    """A field's value from text."""
    kinds = codec.hints(owner)
    if name not in kinds:
        raise unknown("setting", name, kinds, all_by="linvit list settings")
    return codec.parse(text, kinds[name], name)
