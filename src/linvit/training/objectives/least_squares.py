"""The linear maps behind converted layers in closed form: most of an alignment, without a gradient step.

A layer ends in a linear map, `out = W·a + b`, of what its mechanism gives, and the MLP after it ends in another. The W
and b that come closest to what is wanted solve a least squares problem. One pass of some hundred images through teacher
and student fits them all, from the first block to the last: each map is solved when the pass gets to it, and the pass
goes on with the new one. So every map sees what the maps before it made of the images, and what is wanted of it is not
its original's output but what brings the residual stream back to the teacher's: errors do not add up over the blocks.

A ridge holds W near the pretrained one where the images say little. It has to be strong: with a weak one W grows along
directions that are almost empty, and what was trained after that was worse than without the fit (docs/results.md).

Blocks that add their parts to the stream in another way than `x + attn(norm1(x))`, `x + mlp(norm2(x))`, with or without
a layer scale, are told by trying it on the teacher: there the original's output is wanted, and the MLP stays.
"""

from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linvit.measurement.macs import evaluating
from linvit.training.contract import Batch, images_of
from linvit.training.objectives.alignment import hosts_to_align
from linvit.training.objectives.teacher import Activations, Teacher, first_tensor

RIDGE = 1.0  # of the mean square of what goes into the map
CHUNK = 2**15  # rows at once
FEW = 2  # images to find out on how a block adds up
# What timm, first, and Hugging Face's models call the parts of a block, and the linear maps that these end in.
ATTENTION_ENDS, MLP_ENDS = ("proj", "o_proj", "out_proj", "projection"), ("fc2", "down_proj", "lin2", "proj_out")
NORMS, MLPS = ("norm2", "layernorm_after", "layer_norm2", "rms_norm2"), ("mlp", "ffn")
SCALES = ("ls1", "layer_scale1"), ("ls2", "layer_scale2")
ROOM = 0.25, 4 * 2**30  # what the pass may take: of a GPU's memory this share, on the CPU so many bytes


@dataclass
class Place:
    """A converted layer, the block around it, and what of the usual block the two have."""

    host: str
    block: str
    between: str  # the norm between attention and MLP
    mlp: str
    attention_adds: bool = False  # the stream between attention and MLP is the block's input and the layer's output
    mlp_adds: bool = False


def fit_projections(
    teacher: Teacher, student: nn.Module, batches: Iterable[Batch], *, images: int = 1024, ridge: float = RIDGE
) -> list[str]:
    """Fit the maps of the student's converted layers on up to so many images, which pass at once, so fewer where memory
    is short. Gives the names of the layers that have one; layers that end otherwise (LeViT's in a BatchNorm, say) are
    left as they are."""
    found: list[Tensor] = []
    for batch in batches:
        found.append(images_of(batch)[0])
        if sum(map(len, found)) >= images:
            break
    hosts = [n for n in hosts_to_align(teacher.model, student) if linear_in(student.get_submodule(n), ATTENTION_ENDS)]
    if not found:
        return hosts
    picked = torch.cat(found)[:images]
    places = places_of(teacher, hosts, picked[:FEW])
    few = wanted_at(teacher, places, picked[:FEW])
    picked = picked[: room_for(few, len(picked[:FEW]), picked.device)]
    fitting = LeastSquares(student, places, wanted_at(teacher, places, picked), ridge)
    with fitting.hooks, evaluating(student), torch.no_grad(), torch.autocast(picked.device.type, enabled=False):
        student(picked.to(next(student.parameters()).dtype))
    return hosts


def wanted_at(teacher: Teacher, places: list[Place], images: Tensor) -> dict[str, Tensor]:
    """What is wanted at each place for these images: of the stream between attention and MLP, or of the layer, and of
    the block."""
    inputs = [place.between for place in places if place.attention_adds]
    outputs = [place.host for place in places if not place.attention_adds]
    return recorded(teacher, inputs, [*outputs, *(place.block for place in places if place.mlp_adds)], images)


def recorded(teacher: Teacher, inputs: list[str], outputs: list[str], images: Tensor) -> dict[str, Tensor]:
    """What goes into and comes out of modules in one pass; inputs are under `>name`."""
    activations = Activations(teacher.model, inputs, outputs)
    with activations.hooks:
        activations.record()
        teacher.output(images)
        calls, found = activations.take()
    return {**{f">{name}": next(iter((*args, *named.values()))) for name, (args, named) in calls.items()}, **found}


def room_for(seen: dict[str, Tensor], images: int, device: torch.device) -> int:
    """How many images may pass, by what was seen of a few: the pass holds about as much again for the student, and for
    the block that is at work. It goes by what a device has, not by what is free, so that a run repeats itself."""
    share, most = ROOM
    memory = share * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else most
    each = 3 * 4 * sum(tensor.numel() for tensor in seen.values()) / images
    return max(FEW, int(memory / each)) if each else images


def places_of(teacher: Teacher, hosts: list[str], images: Tensor) -> list[Place]:
    """How the blocks around layers add up, found by looking at the teacher's in one pass."""
    modules = dict(teacher.model.named_modules())
    pairs = [(host, host.rpartition(".")[0]) for host in hosts]
    places = [Place(host, b, part_of(modules, b, NORMS), part_of(modules, b, MLPS)) for host, b in pairs]
    blocks = [place for place in places if place.block and place.between in modules]
    inputs = [name for place in blocks for name in (place.block, place.between)]
    outputs = [name for place in blocks for name in (place.block, place.host, place.mlp) if name in modules]
    seen = recorded(teacher, inputs, outputs, images)
    for place in blocks:
        before, middle, after = (seen.get(name) for name in (f">{place.block}", f">{place.between}", place.block))
        scales = [scale_of(modules[place.block], names) for names in SCALES]
        ends = linear_in(modules.get(place.mlp), MLP_ENDS) is not None
        place.attention_adds = adds_up(before, seen.get(place.host), middle, scales[0])
        place.mlp_adds = place.attention_adds and ends and adds_up(middle, seen.get(place.mlp), after, scales[1])
    return places


def part_of(modules: Container[str], block: str, names: Sequence[str]) -> str:
    """The name of a part of a block, by the first of its names that there is."""
    known = [f"{block}.{name}" for name in names]
    return next((name for name in known if name in modules), known[0])


def adds_up(before: Tensor | None, part: Tensor | None, after: Tensor | None, scale: Tensor | float) -> bool:
    """Whether `after` is `before` and the scaled part."""
    if before is None or part is None or after is None or not before.shape == part.shape == after.shape:
        return False
    step = after.float() - before.float()
    return bool((step - part.float() * scale).abs().max() <= 2e-2 * step.abs().max())


def scale_of(block: nn.Module, names: Sequence[str]) -> Tensor | float:
    """The layer scale's factors, 1 where there is none."""
    held = [getattr(getattr(block, name, None), factors, None) for name in names for factors in ("gamma", "lambda1")]
    return next((factors.detach().float() for factors in held if isinstance(factors, Tensor)), 1.0)


class LeastSquares:
    """Solves each map when the student's pass gets to it. Hooks do it all, so the model may be any that has the usual
    names."""

    def __init__(self, student: nn.Module, places: list[Place], wanted: dict[str, Tensor], ridge: float) -> None:
        self.student, self.wanted, self.ridge, self.hooks = student, wanted, ridge, ExitStack()
        self.stream: dict[str, Tensor] = {}
        self.given: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for place in places:
            block = student.get_submodule(place.block)
            if place.attention_adds:
                self.attach(place.host, ATTENTION_ENDS, f">{place.between}", place.block, scale_of(block, SCALES[0]))
            else:
                self.attach(place.host, ATTENTION_ENDS, place.host)
            if place.mlp_adds:
                self.attach(place.mlp, MLP_ENDS, place.block, place.between, scale_of(block, SCALES[1]))

    def attach(
        self, name: str, ends: Sequence[str], wanted: str, before: str = "", scale: Tensor | float = 1.0
    ) -> None:
        """Fit the map that a module ends in, when it is called: to what is wanted of the module itself, or of the
        stream, which came in `before` that module and gets the scaled output added."""
        module = self.student.get_submodule(name)
        linear = linear_in(module, ends)
        if linear is None:
            return

        def see(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.given[linear] = (args[0], output)

        def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.stream[before] = next(iter((*args, *named.values())))

        def fit(module: nn.Module, args: Any, output: Any) -> Any:
            """Solve the map that gave this output, and give the output of the new one. What a module adds after its map
            stays as it is."""
            target = self.wanted[wanted]
            if before:
                target = (target - self.stream.pop(before)) / scale
            rows, gave = self.given.pop(linear)
            out = first_tensor(output)
            goal = gave + (target.to(out.dtype) - out).reshape(gave.shape)
            solve(linear, rows.flatten(0, -2), goal.flatten(0, -2), self.ridge)
            moved = out + (nn.functional.linear(rows, linear.weight, linear.bias) - gave).reshape(out.shape)
            return moved if isinstance(output, Tensor) else (moved, *output[1:])

        self.hooks.enter_context(linear.register_forward_hook(see))
        self.hooks.enter_context(module.register_forward_hook(fit))
        if before:
            self.hooks.enter_context(
                self.student.get_submodule(before).register_forward_pre_hook(note, with_kwargs=True)
            )


def solve(linear: nn.Linear, rows: Tensor, goal: Tensor, ridge: float) -> None:
    """The weight and bias with the least squared error, sums in float64."""
    weight, bias = linear.weight, linear.bias
    place: dict[str, Any] = {"dtype": torch.float64, "device": weight.device}
    gram = torch.zeros(rows.shape[1] + 1, rows.shape[1] + 1, **place)
    cross = torch.zeros(rows.shape[1] + 1, goal.shape[1], **place)
    for part, wanted in zip(rows.split(CHUNK), goal.split(CHUNK), strict=True):
        part = torch.cat([part, torch.ones_like(part[:, :1])], dim=1).double()
        gram += part.T @ part
        cross += part.T @ wanted.double()
    now = torch.cat([weight.T, bias[None] if bias is not None else torch.zeros_like(weight[:, :1]).T]).double()
    hold = ridge * gram.diagonal()[:-1].mean() * torch.ones_like(gram[0])
    hold[-1] = 1e-9 if bias is not None else 1e9 * gram[-1, -1]
    solved = torch.linalg.solve(gram + hold.diag(), cross + hold[:, None] * now)
    if not solved.isfinite().all():
        return  # a layer scale of zero, say: nothing can be wanted of such a map
    weight.copy_(solved[:-1].T)
    if bias is not None:
        bias.copy_(solved[-1])


def linear_in(module: nn.Module | None, names: Sequence[str]) -> nn.Linear | None:
    """The linear map a module ends in, by one of these names."""
    found = (getattr(module, name, None) for name in names)
    return next((linear for linear in found if type(linear) is nn.Linear), None)
