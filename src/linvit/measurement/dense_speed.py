"""`bench model` for detectors and segmenters: softmax and several plans side by side in one run, part by part.

Inference is the whole model's, and beside it each part's alone, on what it is given in the whole: the backbone, its
attention layers (with their projections; in the mode eager), the neck and the head. A training step is forward, the
sum of the losses on drawn targets, backward and AdamW. Both run under autocast with float32 weights. The mode compiled
compiles backbone and neck; heads choose boxes and stay as they are. With random weights a head finds next to nothing
and so has less to do; a saved model does not have that.

All models are first held against their float64 selves, by the maps of the backbone, and what is compiled against what
is not; one that is off gets no speed. Then they are timed by turns.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from linvit import clock
from linvit.attention import Mechanism
from linvit.conversion import find_hosts, open_model
from linvit.errors import LinvitError, unknown
from linvit.measurement.dense_macs import macs_of_parts
from linvit.measurement.model_speed import PASSES, TOLERANCES, key
from linvit.measurement.speed import DTYPES, failure, relative_rms
from linvit.models.dense import DenseModel, Target

KIND = "bench dense"
MODES = ("eager", "compiled")
OBJECTS = 8  # on each drawn image
PATCH = 32  # pixels of a drawn map of labels that are of one class
PARTS = ("backbone", "attention", "neck", "head")

Row = dict[str, Any]
Models = Mapping[str, Callable[[], DenseModel]]
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a module and what it was called with


def make_models(name: str, args: Mapping[str, Any], converts: Mapping[str, Callable[[nn.Module], object]]) -> Models:
    """How to make the model of this name with random weights, or of this folder with its own: as `softmax`, and
    converted. Each is made once at this point, so that what cannot be is told before anything is measured."""
    torch.manual_seed(0)
    softmax: Any = open_model(name, pretrained=False, args=dict(args))
    if not isinstance(softmax, DenseModel):
        raise LinvitError(f"{name} holds no detector or segmenter: give its timm name")
    if getattr(softmax, "linvit_conversions", []):
        raise LinvitError(f"{name} is converted already: give the original, and --plan")

    def converted(convert: Callable[[nn.Module], object]) -> DenseModel:
        model = copy.deepcopy(softmax)
        convert(model)
        return model

    models = {"softmax": partial(copy.deepcopy, softmax)}
    models |= {text: partial(converted, convert) for text, convert in converts.items()}
    for make in models.values():
        make()
    return models


def sweep(
    models: Models,
    *,
    sizes: list[tuple[int, int]],
    batches: list[int],
    dtype: str,
    device: torch.device,
    passes: tuple[str, ...] = PASSES,
    modes: tuple[str, ...] = MODES,
    done: frozenset[tuple[Any, ...]] = frozenset(),
    budget: float = 1.0,
) -> Iterator[Row]:
    """Rows as they are measured: for each size, pass and mode every model, `softmax` first."""
    if dtype not in DTYPES:
        raise unknown("precision", dtype, DTYPES)
    if "graph" in modes:
        raise LinvitError("heads ask the host, so they cannot run as a CUDA graph: use eager or compiled")
    for (size, batch), which, mode in product(zip(sizes, batches, strict=True), passes, modes):
        pixels = size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"
        setting = {"resolution": pixels, "batch": batch, "pass": which, "mode": mode}
        rows = [row for attention in models if key(row := {**setting, "attention": attention}) not in done]
        yield from measure(rows, models, size, dtype, device, budget)
        clock.clean(device)


def measure(
    rows: list[Row],
    models: Models,
    size: tuple[int, int],
    dtype: str,
    device: torch.device,
    budget: float,
) -> list[Row]:
    """The rows of one setting: the error first, MACs and peak memory, and last the times of all that are right, by
    turns; or why there are none."""
    ready: list[tuple[Row, str, Callable[[], object]]] = []
    for row in rows:
        try:
            model = models[row["attention"]]().to(device)
            counted = {"macs": macs_of_parts(model, size)} if row["pass"] == "inference" else {}
            runs, error = prepare(row, model, size, dtype)
            row |= {"status": "ok" if runs else "wrong", "error": min(error, 1e30)}
            if runs:
                row["peak_bytes"] = clock.peak_memory(runs["whole"], device)
                row |= counted
                ready += [(row, part, run) for part, run in runs.items()]
        except LinvitError:
            raise
        except Exception as error:  # a setting that fails must not cost those that are still to come
            row |= failure(error)
    try:
        calls = [run for _, _, run in ready]
        for (row, part, _), timing in zip(
            ready, clock.by_turns(calls, device, budget=budget) if calls else [], strict=True
        ):
            if part == "whole":
                row |= {"images_per_second": row["batch"] / timing.median * 1e3, "ms": asdict(timing)}
            else:
                row.setdefault("parts_ms", {})[part] = asdict(timing)
    except Exception as error:
        for row, _, _ in ready:
            row |= failure(error)
    return rows


def prepare(
    row: Row, model: DenseModel, size: tuple[int, int], dtype: str
) -> tuple[dict[str, Callable[[], object]], float]:
    """What is to be timed, warm: the whole, and in inference its parts; nothing where it is wrong. And its error."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(row["batch"], 3, *size, generator=generator, device=device)
    autocast = partial(torch.autocast, device.type, dtype=DTYPES[dtype], enabled=dtype != "fp32")
    truth, compiled = exact_maps(model.backbone, images[:1]), row["mode"] == "compiled"
    training, parts = row["pass"] == "training", calls_of_parts(model.eval(), images, autocast)
    quick = [call for part in ("backbone", "neck") for call in parts.get(part, [])]
    if compiled:
        training_maps = maps_in_training(model, images, autocast) if training else []
        plain = [found.double() for found in answers(quick, autocast)]
        for module, _, _ in quick:
            module.compile(dynamic=False)
        parts.pop("attention", None)
        error = max(map(relative_rms, answers(quick, autocast), plain))
        if training:
            error = max([error, *map(relative_rms, maps_in_training(model, images, autocast), training_maps)])
    else:
        error = 0.0
    found = answers(parts["backbone"], autocast)
    error = max([error, *(relative_rms(ours[:1], exact) for ours, exact in zip(found, truth, strict=True))])
    if not training:
        runs: dict[str, Callable[[], object]] = {"whole": partial(infer, model, images, autocast)}
        runs |= {part: partial(answers, calls, autocast) for part, calls in parts.items()}
    else:
        runs = {"whole": training_call(model, images, autocast)}
        runs["whole"]()
        if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            error = float("inf")
    if not error <= TOLERANCES[dtype]:
        return {}, error
    for run in runs.values():
        for _ in range(3):
            run()
    model.zero_grad(set_to_none=True)  # a step's gradients count as its own
    return runs, error


def calls_of_parts(model: DenseModel, images: Tensor, autocast: Callable[[], Any]) -> dict[str, list[Call]]:
    """The modules of each part with what they are called with in the whole model."""
    parts = model.parts() | {"attention": [host for _, host in find_hosts(model.backbone)]}
    found: dict[str, list[Call]] = {part: [] for part in PARTS if parts.get(part)}

    def note(part: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[part].append((module, args, kwargs))

    pairs = [(part, module) for part in found for module in parts[part]]
    hooks = [module.register_forward_pre_hook(partial(note, part), with_kwargs=True) for part, module in pairs]
    try:
        infer(model, images, autocast)
    finally:
        for hook in hooks:
            hook.remove()
    return {part: calls for part, calls in found.items() if calls}


def infer(model: DenseModel, images: Tensor, autocast: Callable[[], Any]) -> Any:
    with torch.inference_mode(), autocast():
        return model(images)


def answers(calls: Sequence[Call], autocast: Callable[[], Any]) -> list[Tensor]:
    """What the modules say when they are called so again."""
    with torch.inference_mode(), autocast():
        return tensors_in([module(*args, **kwargs) for module, args, kwargs in calls])


def maps_in_training(model: DenseModel, images: Tensor, autocast: Callable[[], Any]) -> list[Tensor]:
    """The backbone's maps in training mode; none where they are drawn anew each time."""
    if not steady(model.backbone):
        return []
    with autocast():
        found = [picture.detach().double() for picture in model.backbone.train()(images)]
    model.eval()
    return found


def training_call(
    model: DenseModel,
    images: Tensor,
    autocast: Callable[[], Any],
    *,
    forward: Callable[..., dict[str, Tensor]] | None = None,
    recorded: bool = False,
) -> Callable[[], Tensor]:
    """A training step on the images and on drawn targets. `forward` calls the model, compiled perhaps; `recorded` makes
    a step that a CUDA graph can hold."""
    forward = forward or model.train()
    targets = drawn_targets(model, images)
    fused = True if images.is_cuda else None  # as any training there has it: the plain one is all launches
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, capturable=recorded, fused=fused)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with autocast():
            loss = torch.stack([value.float() for value in forward(images, targets).values()]).sum()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def drawn_targets(model: DenseModel, images: Tensor) -> list[Target]:
    """For each image eight boxes anywhere, their masks full, or a map of labels in patches."""
    generator, (height, width) = torch.Generator().manual_seed(0), images.shape[-2:]
    found: list[Target] = []
    for _ in images:
        target: Target = {}
        if model.task == "segment":
            coarse = torch.randint(model.num_classes, (-(-height // PATCH), -(-width // PATCH)), generator=generator)
            fine = coarse.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)
            target["labels"] = fine[:height, :width].contiguous()
        else:
            sides = torch.tensor([width, height, width, height])
            starts, spans = torch.rand(2, OBJECTS, 2, generator=generator)
            target["boxes"] = torch.cat([0.8 * starts, 0.8 * starts + 0.05 + 0.15 * spans], dim=1) * sides
            target["labels"] = torch.randint(model.num_classes, (OBJECTS,), generator=generator)
            if model.masks:
                left, top, right, bottom = target["boxes"][..., None, None].unbind(1)
                rows, columns = torch.arange(height)[:, None], torch.arange(width)
                inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
                target["masks"] = inside.byte()
        size = torch.tensor([height, width])  # stays on the host, as a loader gives it: nobody has to wait for it
        found.append({"size": size, **{name: value.to(images.device) for name, value in target.items()}})
    return found


def exact_maps(backbone: nn.Module, images: Tensor) -> list[Tensor]:
    """The maps of the same weights in float64, every mechanism on its plain reference."""
    twin = on_reference(backbone).double()
    with torch.inference_mode():
        return twin(images.double())


def on_reference(model: Any) -> Any:
    """A copy in evaluation mode, every mechanism on its plain reference."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
    return twin


def steady(module: nn.Module) -> bool:
    """Whether training mode draws nothing: no dropout, no drop path."""
    return not any(getattr(inner, "p", 0) or getattr(inner, "drop_prob", 0) for inner in module.modules())


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def compare_dense(result: dict[str, Any]) -> list[Row]:
    """The rows that were measured, each with its speed and its peak over softmax's in the same setting."""
    softmax = {key(row)[:-1]: row for row in result["rows"] if row["attention"] == "softmax"}
    lines = []
    for row in result["rows"]:
        base, line = softmax.get(key(row)[:-1]), {**row, "ratio": None, "memory_ratio": None}
        if base is not None and base is not row and row["status"] == base["status"] == "ok":
            line["ratio"] = row["images_per_second"] / base["images_per_second"]
            line["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
        lines.append(line)
    return lines
