"""How long each layer and each whole model takes, measured where it will run.

A layer is timed in its place: a picture goes through the converted model, and where it comes to a layer, that layer and
its original are called with the same input by turns. So the input, the grid of tokens and the state of the machine are
those of real work, and a ratio holds although absolute times wander. Layers alike in kind, input and weights are timed
once.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit import clock
from linvit.conversion.convert import find_hosts
from linvit.conversion.dry_run import channels_of, image_part, inputs_for
from linvit.conversion.refusing import told
from linvit.errors import LinvitError, unknown

MODES = ("eager", "compiled", "graph")
PATIENCE = 30_000  # milliseconds that settling a doubt may take, but for five turns of a slow model
DOUBT = 0.03  # a whole model's time may be off what its layers promise by this share of it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """Where and how times are taken. `mode` is that of whole models: plain calls, `torch.compile`, or that replayed as
    a CUDA graph. Single layers are plain calls on a CPU and replayed graphs on a GPU."""

    size: tuple[int, int]
    device: torch.device
    batch: int = 1
    dtype: str = "fp32"
    mode: str = "eager"
    budget: float = 0.2  # seconds for each thing that is timed

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("precision", self.dtype, DTYPES)
        if self.mode not in MODES:
            raise unknown("runtime", self.mode, MODES)
        if self.mode == "graph" and self.device.type != "cuda":
            raise LinvitError("graph needs a CUDA device: use eager or compiled")

    @classmethod
    def usual(cls, model: nn.Module, size: tuple[int, int], device: torch.device | None = None) -> "Setting":
        """A picture at a time in float32 on a CPU, eight in bfloat16 on a GPU."""
        device = device or next(model.parameters()).device
        if device.type == "cuda":
            return cls(size, device, batch=8, dtype="bf16")
        return cls(size, device)

    def place(self, model: nn.Module) -> nn.Module:
        """A copy of the part of the model that pictures go through, where and as it will be timed."""
        return copy.deepcopy(image_part(model)).to(self.device, DTYPES[self.dtype]).eval()

    def picture(self, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        made = torch.randn(self.batch, channels_of(image_part(model)), *self.size, generator=generator)
        return made.to(self.device, DTYPES[self.dtype])


def signature(module: nn.Module, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a layer's time from another's: its kind, its mechanism, its input and its weights."""
    mechanism = getattr(module, "mechanism", None)
    how = None if mechanism is None else (type(mechanism), repr(mechanism.options))
    given = [tuple(a.shape) if isinstance(a, Tensor) else repr(a) for a in (*args, *named.values())]
    weights = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return type(module), how, tuple(given), tuple(weights)


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of a layer's original and, where it was converted, of the layer itself, by turns."""

    original: float
    converted: float | None = None


def time_layers(
    model: nn.Module, converted: nn.Module, setting: Setting, stayed: Collection[str] = ()
) -> dict[str, LayerTime]:
    """The times of all layers that a picture passes; those that stayed as they are have their original's only."""
    before, after = setting.place(model), setting.place(converted)
    originals = dict(find_hosts(before))
    within = next(name for name, module in model.named_modules() if module is image_part(model))
    passes: dict[str, list[LayerTime]] = {}
    known: dict[Any, LayerTime] = {}
    handles = []
    for name, module in find_hosts(after):

        def see(module: nn.Module, args: Any, named: Any, out: Any, name: str = name) -> None:
            whole = f"{within}.{name}" if within else name
            layers = [originals[name], *([] if whole in stayed else [module])]
            key = tuple(signature(layer, args, named) for layer in layers)
            if key not in known:
                known[key] = LayerTime(*time_calls([partial(one.forward, *args, **named) for one in layers], setting))
            passes.setdefault(whole, []).append(known[key])

        handles.append(module.register_forward_hook(see, with_kwargs=True))
    with torch.inference_mode(), told(setting.size):
        given = inputs_for(before, setting.picture(model))
        before(**given)  # what a model caches for a size, it caches here
        after(**given)
    return {name: total(times) for name, times in passes.items()}


def total(times: Sequence[LayerTime]) -> LayerTime:
    """A layer that a picture passes twice costs twice."""
    ours = [time.converted for time in times if time.converted is not None]
    return LayerTime(sum(time.original for time in times), sum(ours) if ours else None)


def time_calls(calls: list[Callable[[], Any]], setting: Setting) -> list[float]:
    for call in calls * 2:
        call()
    if setting.device.type == "cuda":
        try:
            return [clock.graph([call] * 4).median for call in calls]
        except RuntimeError:  # a layer that asks the host cannot be recorded
            torch.cuda.synchronize(setting.device)
    # the quartile that other work on the machine touches least
    return [timing.low for timing in clock.by_turns(calls, setting.device, budget=setting.budget)]


def time_models(
    model: nn.Module, converted: nn.Module, setting: Setting, saved: float | None = None
) -> tuple[float, float]:
    """Milliseconds of a batch of pictures through the whole model and through its converted self, by turns. Where it
    is not faster by what its layers `saved`, it is the machine more often than the model, and longer is measured."""
    if setting.mode != "eager":
        torch._dynamo.reset()
    calls: list[Callable[[], object]] = [model_call(each, setting) for each in (model, converted)]
    with told(setting.size):
        for call in calls * 2:
            call()
    if setting.mode == "graph":
        calls = [clock.record([call]) for call in calls]
    one, other = clock.by_turns(calls, setting.device, budget=5 * setting.budget, least=5)
    if saved is not None and (other.low >= one.low or abs(one.low - other.low - saved) > DOUBT * one.low):
        turns = max(5, min(15, int(PATIENCE / (one.low + other.low))))
        one, other = clock.by_turns(calls, setting.device, budget=15 * setting.budget, least=turns)
    return one.low, other.low


def model_call(model: nn.Module, setting: Setting) -> Callable[[], object]:
    placed = setting.place(model)
    given = inputs_for(placed, setting.picture(model))
    forward = torch.compile(placed, dynamic=False) if setting.mode != "eager" else placed

    def call() -> object:
        with torch.inference_mode():
            return forward(**given)

    return call
