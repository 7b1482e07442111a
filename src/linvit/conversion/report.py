"""What a conversion did: layer by layer for the user, and in short for the saved model."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from linvit.codec import from_plain, to_plain
from linvit.conversion.plan import Plan

if TYPE_CHECKING:
    from linvit.conversion.sensitivity import Sensitivity


@dataclass(frozen=True)
class Source:
    """Where the weights of a model came from, as far as that is known: timm or a checkpoint, or a saved folder."""

    model: str = field(default="", metadata={"sparse": True})
    args: dict[str, Any] = field(default_factory=dict, metadata={"sparse": True})
    pretrained: bool = field(default=False, metadata={"sparse": True})
    checkpoint: str = field(default="", metadata={"sparse": True})
    folder: str = field(default="", metadata={"sparse": True})


@dataclass(frozen=True)
class Conversion:
    """What was done to a model, as `linvit.save` notes it: the plan, what the user dropped, the image size that learned
    positions were laid out for, and where the weights came from."""

    plan: Plan
    drop: tuple[str, ...] = ()
    size: tuple[int, int] | None = field(default=None, metadata={"key": "input_size"})
    source: Source | None = field(default=None, metadata={"sparse": True})

    def to_dict(self) -> dict[str, Any]:
        return {**to_plain(self), "plan": self.plan.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Conversion":
        plan = Plan.from_dict(data.get("plan"))
        return from_plain(cls, {**data, "plan": plan}, "a conversion of the config", ignore=True)


@dataclass(frozen=True)
class Layer:
    """What happened to one host."""

    index: int
    name: str
    before: str
    after: str
    dropped: tuple[str, ...] = ()
    kept: str = ""  # why the plan's mechanism has no place here
    filtered: float | None = None  # how much of a relative bias's work the local branch does in its place

    @property
    def note(self) -> str:
        """What was given up, or why nothing changed, in words."""
        share = "" if self.filtered is None else f" ({self.filtered:.0%} of it in local)"
        lost = [feature + (share if feature == "relative_bias" else "") for feature in self.dropped]
        return f"gave up {', '.join(lost)}" if lost else f"left as it is: {self.kept}" if self.kept else ""

    def __str__(self) -> str:
        note = f"  ({self.note})" if self.note else ""
        return f"{self.index:3d}  {self.name}: {self.before} → {self.after}{note}"


@dataclass(frozen=True)
class Report:
    """What a conversion did, layer by layer. `removed` names the tensors, weights and statistics, that went
    with dropped features; `removed_parameters` counts the learned numbers in them."""

    plan: str
    layers: tuple[Layer, ...] = ()
    new_parameters: int = 0
    removed: tuple[str, ...] = ()
    removed_parameters: int = 0
    sensitivity: "Sensitivity | None" = None

    def __str__(self) -> str:
        changed = sum(layer.before != layer.after for layer in self.layers)
        head = (
            f"plan {self.plan}: {changed} of {len(self.layers)} layers changed, {self.new_parameters:,} new parameters"
        )
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *([self.losses] if self.removed else [])])

    @property
    def losses(self) -> str:
        """What went with dropped features, in words."""
        tensors = f"{len(self.removed)} tensor{'s' if len(self.removed) > 1 else ''}"
        return f"removed {self.removed_parameters:,} parameters of dropped features, in {tensors}"
