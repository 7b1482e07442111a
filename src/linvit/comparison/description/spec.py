"""What is compared: a small TOML file, a preset's name, or flags, read into one frozen value and checked.

    mode = "scratch"                      # train every candidate, or "distil" from one softmax teacher
    task = "features"                     # of distil: backbones learn the teacher's features, without labels
    data = "digits"
    plans = ["softmax", "stella", "mixa:keep=2"]
    [architecture]
    model = "fair"

`docs/comparison.md` has every field. Nothing is built or opened here; `request.survey` does that.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from linvit.codec import from_plain, to_plain
from linvit.comparison.results import SPARSE
from linvit.errors import LinvitError, unknown
from linvit.models.dense import HEADS
from linvit.tasks.kinds import head_of

ALL = "all"  # among the plans: every mechanism that fits
MODES = ("scratch", "distil")
TASKS = ("", "features")  # unless told, what the architecture is made for
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("cpu", "cuda")
# The two architectures of our own, with what can be set of them; any other model is timm's, with timm's arguments.
OWN: dict[str, dict[str, Any]] = {
    "fair": {"width": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "mlp_ratio": 4},
    "vit": {"width": 192, "depth": 12, "heads": 3, "mlp_ratio": 4, "class_token": True},
}
PRESETS = resources.files(__package__) / "presets"
# What fields were called when older stores were asked.
EARLIER = {"candidates": "plans", "sizes": "size", "patch_sizes": "patch_size"}


@dataclass(frozen=True)
class Measure:
    """How candidates are timed. `size` is the ladder of image sizes: None for the trained size, twice and four times
    that; empty for no timing at all."""

    size: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    batch: int = 64
    devices: tuple[str, ...] = ()  # empty: every device present
    precision: str = "auto"  # bf16 on CUDA, fp32 on the CPU
    compile: bool = False
    cuda_graph: bool = True  # on CUDA a pass is replayed, so that what Python takes to start it does not count

    def __post_init__(self) -> None:
        check_numbers("measure.size", self.size or ())
        check_numbers("measure.batch", (self.batch,))
        check_choices("precision", (self.precision,), PRECISIONS)
        check_choices("device", self.devices, DEVICES)


@dataclass(frozen=True)
class Part:
    """A further part of the grid: what it names takes the place of the comparison's own, settings come on top."""

    plans: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
    seeds: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    patch_size: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    size: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    settings: tuple[str, ...] = field(default=(), metadata=SPARSE)


@dataclass(frozen=True)
class Comparison:
    """Same architecture, recipe, data and seeds for every candidate."""

    plans: tuple[str, ...] = ("softmax", "all")
    mode: str = "scratch"
    task: str = field(default="", metadata=SPARSE)  # features: the teacher's are learnt, and no labels
    architecture: dict[str, Any] = field(default_factory=lambda: {"model": "fair"})
    data: str = "digits"
    root: str = ""  # where a named set lies
    recipe: str = ""  # empty: deit from scratch, with a head finetune; fast when distilling
    settings: tuple[str, ...] = ()  # field=value, as `linvit train --set`
    seeds: tuple[int, ...] = (0,)
    patch_size: tuple[int, ...] = ()  # empty: the architecture's own
    size: tuple[int, ...] = ()  # of the images; empty: the architecture's own
    teacher: str = ""  # distil: a folder linvit saved, or a timm model; empty: one is trained first
    teacher_recipe: str = ""  # of the teacher that is trained first; empty: deit, with a head finetune
    teacher_settings: tuple[str, ...] = ()
    measure: Measure = field(default_factory=Measure)
    also: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        check_choices("mode", (self.mode,), MODES)
        check_choices("task", (self.task,), TASKS)
        model = self.architecture.get("model")
        if not isinstance(model, str):
            raise LinvitError('the architecture needs a model: "fair", "vit", a timm model or a head\'s name')
        if model in OWN:
            check_choices(f"setting of architecture {model}", self.architecture.keys() - {"model"}, OWN[model])
        if self.task and (self.mode != "distil" or self.head):
            what = f"and {self.head} learns maps: leave the task out" if self.head else 'so set mode = "distil"'
            raise LinvitError(f"task features learns a teacher's features, {what}")
        if self.teacher and self.mode != "distil":
            raise LinvitError('a teacher is for mode = "distil" (--mode distil)')
        for part in self.parts():
            if not part.plans:
                raise LinvitError("the comparison names no plans: give plans, mechanisms, or all")
            check_numbers("seeds", part.seeds, least=0)
            check_numbers("patch_size", part.patch_size)
            check_numbers("size", part.size)
            if not part.seeds:
                raise LinvitError("the comparison has no seeds: give at least one, such as 0")

    @property
    def head(self) -> str:
        """The name of the detector or segmenter that is compared, as a given teacher or the architecture has it; empty
        for classifiers."""
        model = self.architecture["model"]
        return head_of(self.teacher) if self.teacher else model if model in HEADS else ""

    @property
    def recipe_name(self) -> str:
        return self.recipe or ("fast" if self.mode == "distil" else self.plain_recipe)

    @property
    def teacher_recipe_name(self) -> str:
        return self.teacher_recipe or self.plain_recipe

    @property
    def plain_recipe(self) -> str:
        """What trains a softmax model unless told."""
        return "finetune" if self.head else "deit"

    def parts(self) -> "list[Comparison]":
        """The grid's parts as comparisons of their own, the main one first."""
        found = [replace(self, also=())] if self.also else [self]
        for part in self.also:
            chosen = {name: value for name, value in vars(part).items() if value is not None}
            found.append(replace(self, **{**chosen, "also": (), "settings": (*self.settings, *part.settings)}))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return cast(dict[str, Any], to_plain(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Comparison":
        return from_plain(cls, data, "comparison")


def renamed(data: Any) -> Any:
    """A comparison as an older store holds it, with the fields' names of today."""
    if isinstance(data, Mapping):
        return {EARLIER.get(k, k): renamed(v) if k in ("measure", "also") else v for k, v in data.items()}
    return [renamed(item) for item in data] if isinstance(data, list) else data


def check_choices(what: str, values: Iterable[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise unknown(what, value, known)


def check_numbers(name: str, values: tuple[int, ...], least: int = 1) -> None:
    if any(value < least for value in values):
        raise LinvitError(f"{name} must be at least {least}, got {min(values)}")


def presets() -> list[str]:
    """The names of the comparisons that come with linvit."""
    return sorted(entry.name.removesuffix(".toml") for entry in PRESETS.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """A preset's file, to copy and change."""
    check_choices("preset", (name,), presets())
    return (PRESETS / f"{name}.toml").read_text(encoding="utf-8")


def load(source: str | Path) -> Comparison:
    """The comparison in a TOML file, or the preset of this name."""
    path = Path(source)
    file = path.suffix == ".toml" or path.is_file()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8") if file else preset_text(str(source)))
    except (OSError, UnicodeDecodeError) as error:
        raise LinvitError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise LinvitError(f"{source} is no TOML file: {error}") from None
    return Comparison.from_dict(data)
