"""From what each layer costs with each mechanism to whole plans: the front of time against distance.

A plan's time is predicted as the model's own less what its layers save, its distance as the sum of what its layers turn
the outputs by alone. Along the front each step converts the layer that saves most time for the distance it adds, or
gives a converted layer another mechanism for which that holds. Both predictions are then checked: the whole model is
timed by turns with its original, and its outputs are compared on the images.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from torch import Tensor, nn

from linvit.conversion.convert import find_hosts, find_steps, install, names_to_drop, refuse_idle
from linvit.conversion.plan import Choice, Plan, parse_plan
from linvit.conversion.planning.costs import LayerCost, layer_costs, with_choices
from linvit.conversion.planning.timing import Setting, time_layers, time_models
from linvit.conversion.sensitivity import first_images, outputs, turn
from linvit.errors import LinvitError, NotHonoured

CANDIDATES = ("stella", "relu_linear", "linear_window", "relu_quadratic")
MARGIN = 0.97  # a layer counts as faster when it takes less than this share of its original's time: clocks waver
TIE = 0.99  # whole models nearer than that are equally fast, and the one with less converted is taken


@dataclass(frozen=True)
class LayerOption:
    """A layer with a candidate: its MACs and milliseconds, and how far the outputs turn with it alone; or why not."""

    candidate: str
    macs: int = 0
    ms: float = 0.0
    ratio: float = 0.0  # its original's time over its own, by turns
    turn: float | None = None
    refused: str = ""

    @property
    def pays(self) -> bool:
        return not self.refused and self.ratio * MARGIN > 1


@dataclass(frozen=True)
class LayerOptions:
    """A layer as it is, and with each candidate."""

    cost: LayerCost
    ms: float
    options: tuple[LayerOption, ...]

    @property
    def best(self) -> LayerOption | None:
        """The fastest candidate, where one pays."""
        paying = [option for option in self.options if option.pays]
        return max(paying, key=lambda option: option.ratio, default=None)

    @property
    def large(self) -> bool:
        """Whether linear attention should pay here by its MACs: more tokens than two heads are wide."""
        size = self.cost.size
        return size is not None and size.keys > 2 * size.head_dim and self.cost.mechanism == "softmax"


@dataclass(frozen=True)
class FrontPlan:
    """A whole plan: what was predicted of it, and what was measured. Distances are 1 − cosine of the outputs."""

    plan: Plan
    converted: int
    predicted_ms: float
    predicted_turn: float | None = None
    ms: float | None = None
    speedup: float | None = None
    turn: float | None = None


@dataclass(frozen=True)
class Study:
    """What was measured of a model at a size: its layers, and the front of plans, the least converted first."""

    setting: Setting
    ms: float
    layers: tuple[LayerOptions, ...]
    front: tuple[FrontPlan, ...] = field(default=())
    images: int = 0

    def ratio(self, index: int, choice: Choice) -> float | None:
        """How many times as fast a layer was measured to be with this choice."""
        options = (o for o in self.layers[index].options if not o.refused)
        return next((o.ratio for o in options if parse_plan(o.candidate).default == choice), None)

    def missed(self) -> list[str]:
        """Why layers that linear attention should suit were left: one line for each reason."""
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if layer.large and layer.best is None:
                refused = [option.refused for option in layer.options if option.refused]
                fast = max((option.ratio for option in layer.options if not option.refused), default=0.0)
                faster = "clearly faster" if fast > 1 else "faster"
                why = f"no candidate is {faster} (best {fast:.2f}×)" if fast else refused[0]
                reasons.setdefault(why, []).append(layer.cost.index)
        return [f"layers {', '.join(map(str, layers))}: {why}" for why, layers in reasons.items()]

    def choose(self, *, speedup: float | None = None, budget_ms: float | None = None) -> FrontPlan:
        """The plan of least distance that is fast enough. Where nothing is asked for the fastest, or of those that are
        as good as it the one that converts least."""
        wanted, found = "", [p for p in self.front if p.speedup is not None]
        if speedup is not None:
            wanted, found = f"{speedup:g}× faster", [p for p in found if (p.speedup or 0) >= speedup]
        if budget_ms is not None:
            wanted, found = f"{budget_ms:g} ms", [p for p in found if (p.ms or 0) <= budget_ms]
        if not found:
            best = max((p.speedup or 1.0 for p in self.front), default=1.0)
            raise LinvitError(
                f"no plan of these candidates reaches {wanted or 'that'}: the fastest is {best:.2f}×, "
                f"{self.ms / best:.3g} ms of {self.ms:.3g}"
            )
        if wanted:
            return min(found, key=lambda p: (p.turn if p.turn is not None else p.converted, p.converted))
        best = max(p.speedup or 1.0 for p in found)
        return next(p for p in found if (p.speedup or 1.0) >= TIE * best)


def the_choice(text: str) -> Choice:
    """The one mechanism that a candidate is."""
    plan = parse_plan(text)
    if plan.default is None or any(not rule.optional for rule in plan.rules):
        raise LinvitError(f"{text} gives different layers different mechanisms: name those as candidates instead")
    return plan.default


@dataclass(frozen=True)
class Candidate:
    """A mechanism in every layer of a copy of the model that can have it, and why the others cannot."""

    text: str
    choice: Choice
    model: nn.Module
    refused: dict[str, str]

    @classmethod
    def of(cls, text: str, model: nn.Module, dropped: tuple[str, ...], size: tuple[int, int]) -> "Candidate":
        choice, hosts, refused = the_choice(text), find_hosts(model), {}
        for index, (name, _) in enumerate(hosts):
            alone = with_choices(text, [choice if i == index else None for i in range(len(hosts))])
            try:
                steps, kept = find_steps(model, alone, dropped, size=size)
            except NotHonoured as lacking:
                together = ",".join((*dropped, *lacking.features))
                refused[name] = f"{lacking.reason.partition(' from ')[0]}; --drop {together} gives up what it cannot"
            except LinvitError as error:
                refused[name] = str(error)
            else:
                if not steps:
                    refused[name] = f"left as it is: {kept[name]}"
        converted = copy.deepcopy(model)
        wanted = [None if name in refused else choice for name, _ in hosts]
        install(converted, find_steps(converted, with_choices(text, wanted), dropped, size=size)[0])
        return cls(text, choice, converted, refused)

    def turns(self, original: nn.Module, pictures: list[Tensor], teacher: list[Tensor]) -> dict[str, float]:
        """How far the outputs turn when only one layer is converted, for each."""
        names = [name for name, _ in find_hosts(original)]
        ours = {name: self.model.get_submodule(name) for name in names}
        found: dict[str, float] = {}
        for name in names if pictures else ():
            if name not in self.refused:
                for other in names:
                    self.model.set_submodule(other, ours[name] if other == name else original.get_submodule(other))
                found[name] = turn(teacher, [outputs(self.model, batch) for batch in pictures])
        for name, module in ours.items():
            self.model.set_submodule(name, module)
        return found


def study(
    model: nn.Module,
    setting: Setting,
    *,
    candidates: Sequence[str] = CANDIDATES,
    loader: Iterable[Any] | None = None,
    images: int = 64,
    drop: Iterable[str] = (),
    stay: Collection[int] = (),
    keep: int = 0,
    points: int = 8,
    advance: Callable[[str], None] = lambda what: None,
) -> Study:
    """Measure every layer with every candidate, and whole plans along the front. The model is not changed.

    `loader` yields unlabelled images, for the distances. The layers of `stay` are not to be converted, and of the
    others so many that `keep` are left as they are. `points` is the number of plans that are checked as whole models.
    `advance` hears what is done after each measurement.
    """
    dropped = names_to_drop(drop)
    costs = layer_costs(model, setting.size)
    if not costs:
        raise LinvitError(f"{type(model).__name__} has no attention that linvit can swap")
    if keep > len(costs):
        raise LinvitError(f"cannot keep {keep} layers: the model has {len(costs)}")
    refuse_idle(model, Plan("auto", None), dropped, [], by_times=True)
    pictures = list(first_images(loader, images, next(model.parameters()).device)) if loader is not None else []
    teacher = [outputs(model, batch) for batch in pictures]
    options: list[list[LayerOption]] = [[] for _ in costs]
    own: list[list[float]] = [[] for _ in costs]
    for text in candidates:
        candidate = Candidate.of(text, model, dropped, setting.size)
        times = time_layers(model, candidate.model, setting, candidate.refused)
        after = {cost.name: cost.macs for cost in layer_costs(candidate.model, setting.size)}
        turns = candidate.turns(model, pictures, teacher)
        for cost in costs:
            time = times.get(cost.name)
            own[cost.index] += [] if time is None else [time.original]
            if cost.index in stay:
                option = LayerOption(text, refused="to stay as it is")
            elif time is None or time.converted is None:
                reason = candidate.refused.get(cost.name, "a picture does not pass it")
                option = LayerOption(text, refused=reason)
            else:
                ratio = time.original / time.converted
                option = LayerOption(text, after[cost.name], time.converted, ratio, turns.get(cost.name))
            options[cost.index].append(option)
        advance(f"layers with {text}")
    layers = tuple(
        LayerOptions(cost, median(times) if times else 0.0, tuple(found))
        for cost, times, found in zip(costs, own, options, strict=True)
    )
    found = Study(setting, 0.0, layers, images=sum(map(len, pictures)))
    return check(model, thinned(front(found, dropped, len(costs) - keep), points), found, pictures, teacher, advance)


def front(found: Study, dropped: tuple[str, ...], most: int) -> Iterator[FrontPlan]:
    """Plans along the front, from nothing converted on to `most` layers. Without images every converted layer counts
    alike."""
    known = found.images > 0
    own = sum(layer.ms for layer in found.layers)
    now: list[LayerOption | None] = [None] * len(found.layers)

    def saved(index: int, option: LayerOption | None) -> float:
        return found.layers[index].ms * (1 - 1 / option.ratio) if option is not None else 0.0

    def cost(option: LayerOption | None) -> float:
        if option is None:
            return 0.0
        return max(option.turn or 0.0, 1e-9) if known else 1.0

    while True:
        ahead = sum(saved(i, option) for i, option in enumerate(now))
        turned = sum(cost(option) for option in now) if known else None
        choices = [parse_plan(o.candidate).default if o is not None else None for o in now]
        plan, converted = with_choices("auto", choices, dropped), sum(o is not None for o in now)
        yield FrontPlan(plan, converted, own - ahead, turned)
        moves = [
            (saved(i, option) - saved(i, now[i]), cost(option) - cost(now[i]), i, option)
            for i, layer in enumerate(found.layers)
            for option in layer.options
            if option.pays and option is not now[i] and (now[i] is not None or converted < most)
        ]
        moves = [move for move in moves if move[0] > 1e-6]
        if not moves:
            return
        *_, index, best = max(moves, key=lambda move: (move[0] / max(move[1], 1e-12), move[0]))
        now[index] = best


def thinned(plans: Iterable[FrontPlan], points: int) -> list[FrontPlan]:
    """At most so many, evenly, the first and the last among them."""
    every = list(plans)
    if len(every) <= points:
        return every
    chosen = sorted({round(i * (len(every) - 1) / (points - 1)) for i in range(points)})
    return [every[i] for i in chosen]


def check(
    model: nn.Module,
    plans: list[FrontPlan],
    found: Study,
    pictures: list[Tensor],
    teacher: list[Tensor],
    advance: Callable[[str], None],
) -> Study:
    """The plans with the times and distances of the whole models beside what was predicted."""
    done, times = [], []
    for one in plans:
        if not one.converted:
            done.append(replace(one, speedup=1.0, turn=0.0 if pictures else None))
            continue
        student = copy.deepcopy(model)
        install(student, find_steps(student, one.plan, one.plan.drop, size=found.setting.size)[0])
        saved = sum(layer.ms for layer in found.layers) - one.predicted_ms
        before, after = time_models(model, student, found.setting, saved)
        times.append(before)
        turned = turn(teacher, [outputs(student, batch) for batch in pictures]) if pictures else None
        done.append(replace(one, speedup=before / after, turn=turned))
        advance(f"a plan with {one.converted} layers")
    own = median(times or [time_models(model, model, found.setting)[0]])
    rest = own - sum(layer.ms for layer in found.layers)  # what is not attention takes as long in every plan
    done = [replace(p, ms=own / (p.speedup or 1.0), predicted_ms=rest + p.predicted_ms) for p in done]
    return replace(found, ms=own, front=tuple(done))
