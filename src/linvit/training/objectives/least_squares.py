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

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.training.contract import Batch, images_of
from linvit.training.objectives.activations import Activations, first_tensor
from linvit.training.objectives.alignment import hosts_to_align
from linvit.training.objectives.teacher import Teacher

RIDGE = 1.0  # of the mean square of what goes into the map
CHUNK = 2**15  # rows at once
FEW = 2  # images to find out on how a block adds up
ROOM = 0.25, 4 * 2**30  # what the pass may take: of a GPU's memory this share, on the CPU so many bytes


@dataclass(frozen=True)
class Place:
    """A converted layer, the block around it, and what of the usual block the two have."""

    host: str
    block: str
    attention_adds: bool  # the stream between attention and MLP is the block's input and the layer's output
    mlp_adds: bool

    @property
    def between(self) -> str:
        return f"{self.block}.norm2"

    @property
    def mlp(self) -> str:
        return f"{self.block}.mlp"


def fit_projections(
    teacher: Teacher,
    student: nn.Module,
    batches: Iterable[Batch],
    *,
    images: int = 1024,
    ridge: float = RIDGE,
) -> list[str]:
    """Fit the maps of the student's converted layers on up to so many images, which pass at once, so fewer where memory
    is short. Gives the names of the layers that have one; layers that end otherwise (LeViT's in a BatchNorm, say) are
    left as they are."""
    picked = first_images(batches, images)
    hosts = [name for name in hosts_to_align(teacher.model, student) if projection_of(student, name) is not None]
    if picked is None:
        return hosts
    places = places_of(teacher, hosts, picked[:FEW])
    few = wanted_at(teacher, places, picked[:FEW])
    picked = picked[: room_for(few, len(picked[:FEW]), picked.device)]
    fitting = LeastSquares(student, places, wanted_at(teacher, places, picked), ridge)
    modes = {module: module.training for module in student.modules()}
    like = next(student.parameters())
    try:
        with torch.no_grad(), torch.autocast(picked.device.type, enabled=False):
            student.eval()(picked.to(like.dtype))
    finally:
        fitting.close()
        for module, training in modes.items():
            module.training = training
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
    try:
        activations.record()
        teacher(images)
        calls, found = activations.take()
    finally:
        activations.close()
    return {**{f">{name}": args[0] for name, (args, _) in calls.items()}, **found}


def room_for(seen: dict[str, Tensor], images: int, device: torch.device) -> int:
    """How many images may pass, by what was seen of a few: the pass holds about as much again for the student, and for
    the block that is at work. It goes by what a device has, not by what is free, so that a run repeats itself."""
    share, most = ROOM
    memory = share * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else most
    each = 3 * 4 * sum(tensor.numel() for tensor in seen.values()) / images
    return max(FEW, int(memory / each)) if each else images


def first_images(batches: Iterable[Batch], count: int) -> Tensor | None:
    found: list[Tensor] = []
    for batch in batches:
        found.append(images_of(batch)[0])
        if sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count] if found else None


def places_of(teacher: Teacher, hosts: list[str], images: Tensor) -> list[Place]:
    """How the blocks around layers add up, found by looking at the teacher's in one pass."""
    modules = dict(teacher.model.named_modules())
    usual = [Place(host, host.rpartition(".")[0], True, True) for host in hosts]
    blocks = [place for place in usual if place.block and place.between in modules]
    inputs = [name for place in blocks for name in (place.block, place.between)]
    outputs = [name for place in blocks for name in (place.block, place.host, place.mlp) if name in modules]
    seen = recorded(teacher, inputs, outputs, images)
    return [as_it_is(place, modules, seen) for place in usual]


def as_it_is(place: Place, modules: dict[str, nn.Module], seen: dict[str, Tensor]) -> Place:
    """A place with what of the usual block it really has, by what was seen there."""
    parent = modules.get(place.block)
    before, middle = seen.get(f">{place.block}"), seen.get(f">{place.between}")
    if not place.block or parent is None or middle is None:
        return replace(place, attention_adds=False, mlp_adds=False)
    first = adds_up(before, seen.get(place.host), middle, scale_of(parent, "ls1"))
    second = adds_up(middle, seen.get(place.mlp), seen.get(place.block), scale_of(parent, "ls2"))
    ends = last_linear(modules.get(place.mlp)) is not None
    return replace(place, attention_adds=first, mlp_adds=first and second and ends)


def adds_up(before: Tensor | None, part: Tensor | None, after: Tensor | None, scale: Tensor | float) -> bool:
    """Whether `after` is `before` and the scaled part."""
    if before is None or part is None or after is None or not before.shape == part.shape == after.shape:
        return False
    step = after.float() - before.float()
    return bool((step - part.float() * scale).abs().max() <= 2e-2 * step.abs().max())


def scale_of(block: nn.Module, name: str) -> Tensor | float:
    """The layer scale's factors, 1 where there is none."""
    gamma = getattr(getattr(block, name, None), "gamma", None)
    return gamma.detach().float() if isinstance(gamma, Tensor) else 1.0


class LeastSquares:
    """Solves each map when the student's pass gets to it. Hooks do it all, so the model may be any that has the usual
    names."""

    def __init__(self, student: nn.Module, places: list[Place], wanted: dict[str, Tensor], ridge: float) -> None:
        self.student, self.wanted, self.ridge = student, wanted, ridge
        self.stream: dict[str, Tensor] = {}
        self.given: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.handles: list[Any] = []
        for place in places:
            self.attach(place)

    def attach(self, place: Place) -> None:
        find = self.student.get_submodule
        projection = projection_of(self.student, place.host)
        assert projection is not None
        self.hook(projection, self.see)
        self.hook(find(place.host), partial(self.fit_attention, place, projection))
        if place.attention_adds:
            self.note(place.block)
        last = last_linear(find(place.mlp)) if place.mlp_adds else None
        if last is not None:
            self.note(place.between)
            self.hook(last, self.see)
            self.hook(find(place.mlp), partial(self.fit_mlp, place, last))

    def hook(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.handles.append(module.register_forward_hook(function))

    def note(self, name: str) -> None:
        """Keep what goes into a module: the stream at that place."""

        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.stream[name] = args[0]

        self.handles.append(self.student.get_submodule(name).register_forward_pre_hook(see))

    def see(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.given[module] = (args[0], output)

    def fit_attention(self, place: Place, projection: nn.Linear, module: nn.Module, args: Any, output: Any) -> Any:
        if place.attention_adds:
            step = self.wanted[f">{place.between}"] - self.stream.pop(place.block)
            target = step / scale_of(self.student.get_submodule(place.block), "ls1")
        else:
            target = self.wanted[place.host]
        return self.refit(projection, output, target)

    def fit_mlp(self, place: Place, last: nn.Linear, module: nn.Module, args: Any, output: Any) -> Any:
        step = self.wanted[place.block] - self.stream.pop(place.between)
        return self.refit(last, output, step / scale_of(self.student.get_submodule(place.block), "ls2"))

    def refit(self, linear: nn.Linear, output: Any, target: Tensor) -> Any:
        """Solve the map that gave this output, and give the output of the new one. What a module adds after its map
        stays as it is."""
        rows, gave = self.given.pop(linear)
        out = first_tensor(output)
        goal = gave + (target.to(out.dtype) - out).reshape(gave.shape)
        solve(linear, rows.flatten(0, -2), goal.flatten(0, -2), self.ridge)
        moved = out + (nn.functional.linear(rows, linear.weight, linear.bias) - gave).reshape(out.shape)
        return moved if isinstance(output, Tensor) else (moved, *output[1:])

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


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


def projection_of(model: nn.Module, name: str) -> nn.Linear | None:
    """The linear layer an attention layer ends in, by the name timm gives it."""
    found = getattr(model.get_submodule(name), "proj", None)
    return found if type(found) is nn.Linear else None


def last_linear(mlp: nn.Module | None) -> nn.Linear | None:
    found = getattr(mlp, "fc2", None)
    return found if type(found) is nn.Linear else None
