"""What a conversion did: layer by layer for the user, and in short for the saved model."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from linvit.codec import from_plain, to_plain
from linvit.conversion.plan import Plan

if TYPE_CHECKING:
    from linvit.conversion.planning import Study
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
    linear: bool = False  # whether it was converted to a linear mechanism
    tokens: int = 0  # of one sequence, and the MACs of a picture, where they were counted
    macs: tuple[int, int] | None = None
    speedup: float | None = None  # its original's time over its own, where `auto` measured it

    @property
    def loses(self) -> bool:
        """Whether the layer became linear and costs more MACs than before, where its time is not known."""
        return self.linear and self.speedup is None and self.macs is not None and self.macs[1] > self.macs[0]

    @property
    def notes(self) -> list[str]:
        """What was given up, why nothing changed, whether it costs more, and what it was measured to gain, in words."""
        share = "" if self.filtered is None else f" ({self.filtered:.0%} of it in local)"
        lost = [feature + (share if feature == "relative_bias" else "") for feature in self.dropped]
        notes = [f"gave up {', '.join(lost)}"] if lost else []
        notes += [f"left as it is: {self.kept}"] if self.kept else []
        notes += ["costs more than before"] if self.loses else []
        return notes + ([] if self.speedup is None else [f"measured {self.speedup:.2f}×"])

    def __str__(self) -> str:
        notes = self.notes
        if self.macs is not None:
            notes.append(f"{self.tokens} tokens, {self.macs[0] / 1e6:,.1f} → {self.macs[1] / 1e6:,.1f} MMACs")
        shown = f"  ({'; '.join(notes)})" if notes else ""
        return f"{self.index:3d}  {self.name}: {self.before} → {self.after}{shown}"


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
    study: "Study | None" = None
    asked: tuple[str, ...] = ()  # what the user named to be dropped

    def __str__(self) -> str:
        changed = sum(layer.before != layer.after for layer in self.layers)
        head = (
            f"plan {self.plan}: {changed} of {len(self.layers)} layers changed, {self.new_parameters:,} new parameters"
        )
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *self.losses, *self.advice])

    @property
    def advice(self) -> list[str]:
        """What to know and to do next, a line each."""
        lines = []
        losing = [str(layer.index) for layer in self.layers if layer.loses]
        if losing:
            lines.append(f"layers {', '.join(losing)} cost more MACs than before: --plan auto leaves such layers")
        changed = [layer for layer in self.layers if layer.before != layer.after]
        if not any(layer.linear for layer in self.layers):
            lines.append("no layer became linear: the model keeps its cost at large sizes")
        counted = [layer.macs for layer in self.layers if layer.macs is not None]
        if counted:
            before, after = (sum(column) / 1e6 for column in zip(*counted, strict=True))
            lines.append(f"attention: {before:,.1f} → {after:,.1f} MMACs a picture")
        if self.study is not None:
            speedup = self.study.choose().speedup or 1.0
            lines.append(f"measured: {speedup:.2f}× as fast as before")
            lines += [f"left although they are large: {line}" for line in self.study.missed()]
        if changed:
            lines.append("its accuracy has to be trained back: linvit train --recipe fast")
        return lines

    @property
    def losses(self) -> list[str]:
        """What was given up, by whom, and what went with it: a line each, none where nothing was."""
        layers = Counter(feature for layer in self.layers for feature in layer.dropped)
        lines = []
        for who, named in ((f"plan {self.plan} gave up", False), ("given up as asked:", True)):
            told = [
                f"{feature} in {count} layer{'s' if count > 1 else ''}"
                for feature, count in layers.items()
                if (feature in self.asked) == named
            ]
            lines += [f"{who} {', '.join(told)}"] if told else []
        if self.removed:
            tensors = f"{len(self.removed)} tensor{'s' if len(self.removed) > 1 else ''}"
            lines.append(f"removed {self.removed_parameters:,} parameters of dropped features, in {tensors}")
        return lines
