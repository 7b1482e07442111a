"""Which layers' hosts get which mechanism.

A plan is an ordered list of rules and a default; the first rule that matches a host decides. "MixA with k = 6" is one.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from linvit.attention import Range, check_options, list_mechanisms
from linvit.codec import check_fields, check_keywords, from_plain, keywords, to_plain
from linvit.errors import LinvitError, unknown


@dataclass(frozen=True)
class Choice:
    """A mechanism and its options."""

    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self.mechanism, self.options)

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.mechanism}({options})" if options else self.mechanism


VERSION = 1
COMMA = re.compile(r",(?![^\[{(]*[\]})])")  # one that stands outside brackets
Layer = Annotated[int, Range(0)]
Layers = Layer | tuple[Layer, ...]
Place = Literal["first", "last", "alternating"]
PLACES: tuple[str, ...] = get_args(Place)


@dataclass(frozen=True)
class Pick:
    """So many layers at the first, last or evenly spread positions, whatever the depth of the model."""

    count: Layer
    where: Place = "first"

    def __post_init__(self) -> None:
        check_fields(self)

    def layers(self, total: int) -> tuple[int, ...]:
        if self.count > total:
            raise LinvitError(f"cannot keep {self.count} layers: the model has {total}")
        if self.where == "alternating":
            return tuple(i * total // self.count for i in range(self.count))
        return tuple(range(self.count)) if self.where == "first" else tuple(range(total - self.count, total))


@dataclass(frozen=True)
class Rule:
    """What hosts at these positions, or with names that this pattern finds, get; `None` keeps them as they are."""

    choice: Choice | None = None
    layers: tuple[int, ...] | Pick | None = None
    pattern: str | None = None
    optional: bool = False  # a model without such a layer is no mistake

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise LinvitError(f"the pattern '{self.pattern}' is not a regular expression: {error}") from None

    def matching(self, names: Sequence[str]) -> set[int]:
        """Positions of the hosts this rule speaks of."""
        total = len(names)
        layers = self.layers.layers(total) if isinstance(self.layers, Pick) else self.layers
        beyond = [layer for layer in layers or () if not 0 <= layer < total]
        if beyond:
            raise LinvitError(f"the plan names layer {beyond[0]}, but the model has layers 0–{total - 1}")
        found = set(range(total) if layers is None else layers)
        if self.pattern is not None:
            found = {i for i in found if re.search(self.pattern, names[i])}
        if not found and not self.optional:
            raise LinvitError(f"a rule of the plan matches no layer: pattern '{self.pattern}'")
        return found


@dataclass(frozen=True)
class Plan:
    """Rules in order, then the default; `None` keeps a host.

    `drop` is a permission: what a mechanism may give up where it cannot honour it. Layers whose mechanism can honour it
    keep it, other than what a user names in `convert(..., drop=…)`.
    """

    name: str
    default: Choice | None
    rules: tuple[Rule, ...] = ()
    drop: tuple[str, ...] = ()
    version: int = VERSION  # of the plan as plain data

    def choices(self, names: Sequence[str]) -> list[Choice | None]:
        """The choice for each host, in the order of the model. The first rule wins, but two that name the same layer by
        its number and want different things are a mistake."""
        named: dict[int, Choice | None] = {}
        for rule in self.rules:
            for layer in rule.layers if isinstance(rule.layers, tuple) and rule.pattern is None else ():
                if named.setdefault(layer, rule.choice) != rule.choice:
                    wishes = " and ".join(str(choice or "as it is") for choice in (named[layer], rule.choice))
                    raise LinvitError(f"rules of plan {self.name} conflict: layer {layer} is to be {wishes}")
        chosen = [self.default] * len(names)
        for rule in reversed(self.rules):
            for index in rule.matching(names):
                chosen[index] = rule.choice
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with a version. `from_dict` reads it back."""
        try:
            return cast(dict[str, Any], json.loads(json.dumps({"version": VERSION, **to_plain(self)}, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise LinvitError(f"plan {self.name} has an option that JSON cannot hold: {error}") from None

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """A plan from what `to_dict` made, or from JSON written by hand."""
        version = data.get("version") if isinstance(data, dict) else None
        if not isinstance(version, int) or version < 1:
            raise LinvitError(f'a plan is a JSON object with "version": {VERSION}')
        if version > VERSION:
            raise LinvitError(f"the plan has version {version}, this linvit reads up to {VERSION}: upgrade linvit")
        return from_plain(cls, data, "the plan")


PLANS: dict[str, Callable[..., Plan]] = {}


def named(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """Decorator: make a plan known by its function's name, and check its options by their annotations. Those it passes
    on are the mechanism's to check."""
    name, kinds = plan.__name__, {option: kind for option, (kind, _) in keywords(plan).items()}
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(plan).parameters.values())

    @wraps(plan)
    def checked(**options: Any) -> Plan:
        given = {option: value for option, value in options.items() if not passes_on or option in kinds}
        return plan(**{**options, **check_keywords(given, kinds, f"plan {name}")})

    PLANS[name] = checked
    return checked


@named
def mixa(*, keep: Layers = 6, where: Place = "first", local: int = 0) -> Plan:
    """MixA: ReLU-quadratic attention in the layers of `keep`, SteLLA in the others.

    `keep` lists the quadratic layers, or counts them and `where` places them: first, last or alternating. The paper
    keeps 6 by an analysis it does not describe; `linvit.convert(..., calibrate=loader)` measures which. With `local`,
    all layers get a convolution of that width beside their attention, which is not the paper's.
    """
    options = {"local": local} if local else {}
    rules = (Rule(Choice("relu_quadratic", options), layers=layers_of(keep, where)),) if keep else ()
    return Plan("mixa", Choice("stella", options), rules, drop=("relative_bias", "shift_mask"))


def layers_of(keep: Layers, where: Place = "first") -> Pick | tuple[int, ...]:
    """The layers that `keep` counts and `where` places, or that it lists."""
    if not isinstance(keep, int) and where != "first":
        raise LinvitError("keep lists its layers: where= places those that it counts")
    return Pick(keep, where) if isinstance(keep, int) else tuple(keep)


@named
def castling(*, sparse: bool = True, **options: Any) -> Plan:
    """Castling-ViT: linear-angular attention with its depthwise residual and its train-only sparse softmax branch."""
    choice = Choice("castling", {"sparse": sparse, **options})
    return Plan("castling", choice, drop=("relative_bias", "shift_mask", "talking_heads"))


@named
def qt(*, position: bool = True, shortcut: bool = True, **options: Any) -> Plan:
    """QT-ViT: quadratic Taylor attention with absolute position on keys and the BatchNorm + GELU shortcut."""
    choice = Choice("qt", {"position": position, "shortcut": shortcut, **options})
    return Plan("qt", choice, drop=("relative_bias", "shift_mask", "talking_heads"))


@named
def mobile(**options: Any) -> Plan:
    """Mobile-Attention. It needs as many keys as queries, so PVTv2's pooling goes; hosts that subsample their queries
    keep softmax."""
    subsampling = Rule(Choice("softmax"), pattern=r"downsample", optional=True)
    return Plan(
        "mobile",
        Choice("mobile", options),
        (subsampling,),
        drop=("relative_bias", "shift_mask", "talking_heads", "pooling"),
    )


@dataclass(frozen=True)
class Auto(Plan):
    """What `convert` makes a plan of: each layer gets the candidate that is measured to be the fastest on the model's
    device at the image size, and stays as it is where none is faster."""

    candidates: tuple[str, ...] = ()

    def choices(self, names: Sequence[str]) -> list[Choice | None]:
        raise LinvitError(
            "auto measures a model before it is a plan: `linvit plan MODEL --size PIXELS -o FILE` makes one"
        )

    def to_dict(self) -> dict[str, Any]:
        self.choices(())
        raise AssertionError


AUTO = ("stella", "relu_linear")  # what `auto` may make of a layer unless told


@named
def auto(*, candidates: str | tuple[str, ...] = AUTO) -> Plan:
    """Ours: in each layer the fastest of the candidates, measured, or what it has where none is faster."""
    listed = split_plans(candidates.strip("[]")) if isinstance(candidates, str) else candidates
    for text in listed:
        parse_plan(text)
    return Auto("auto", None, candidates=tuple(listed))


KEEPING = {name: kind for name, (kind, _) in keywords(mixa).items() if name in ("keep", "where")}


def list_plans() -> list[str]:
    """The named plans; every mechanism's name is a plan as well."""
    return sorted(PLANS)


def as_plan(plan: str | Plan, **options: Any) -> Plan:
    """A plan from a plan's or a mechanism's name and its options. As mixa, every plan takes `keep`, a number or a list
    of layers, and `where`: these stay as they are."""
    if plan != "mixa" and "keep" in options:
        placing = {name: options.pop(name) for name in KEEPING if name in options}
        made = as_plan(plan, **options)
        layers = layers_of(**check_keywords(placing, KEEPING, f"plan {made.name}"))
        return replace(made, rules=(Rule(None, layers=layers), *made.rules)) if placing["keep"] else made
    if isinstance(plan, Plan):
        if options:
            raise LinvitError(f"options go with a plan's name, not with a finished plan: {', '.join(options)}")
        return plan
    if plan in PLANS:
        return PLANS[plan](**options)
    if plan not in list_mechanisms():
        raise unknown("plan", plan, {*PLANS, *list_mechanisms()})
    return Plan(plan, Choice(plan, options))


def parse_plan(text: str, **options: Any) -> Plan:
    """A plan as it is typed: a name, a name with options (`mixa:keep=6,where=last`), or a plan's JSON file."""
    name, named = split_options(text)
    if not name.endswith(".json"):
        twice = sorted(named.keys() & options.keys())
        if twice:
            raise LinvitError(f"the option {twice[0]} of plan {name} is given twice")
        return as_plan(name, **named, **options)
    if named:
        raise LinvitError(f"options go with a plan's name, not with a plan's file: '{text}'")
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LinvitError(f"cannot read the plan {name}: {error}") from None
    return as_plan(Plan.from_dict(data), **options)


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """`name:option=value,option=value` as the name and the options, each value read as JSON where it is JSON."""
    name, colon, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for piece in COMMA.split(rest) if colon else ():
        option, equals, value = piece.partition("=")
        if not equals or not option.strip():
            raise LinvitError(f"a plan's options are written name:option=value,option=value; got '{text}'")
        try:
            options[option.strip()] = json.loads(value)
        except ValueError:
            options[option.strip()] = value.strip()
    return name, options


def split_plans(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` as plans: a piece with `=` and no colon is a further option of the one before."""
    found: list[str] = []
    for piece in (piece.strip() for piece in COMMA.split(text)):
        if found and "=" in piece and ":" not in piece.partition("=")[0]:
            found[-1] += f",{piece}"
        elif piece:
            found.append(piece)
    return found
