"""`bench model`: a timm model with softmax attention against its converted self, side by side in one run.

The softmax model is timm's own, with its fused SDPA. Inference runs in the chosen dtype; a training step is forward,
cross-entropy, backward and AdamW under autocast with float32 weights. Both models are first held against their own
float64 selves on one image, a compiled training step against the eager one; one that is off gets no speed. Then they
are timed by turns, so that whatever happens to the machine meantime happens to both. The mode `graph` is the compiled
model replayed as a CUDA graph: what the host needs to send the work is not in it.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import clock
from linvit.attention import Mechanism
from linvit.conversion.refusing import told
from linvit.errors import LinvitError, unknown
from linvit.measurement.speed import DTYPES, failure, relative_rms

PASSES = ("inference", "training")
MODES = ("eager", "compiled", "graph")
KEY = ("resolution", "batch", "pass", "mode", "attention")
# Relative RMS of the logits against float64. Half precision rounds after every layer, and a dozen of them add up.
TOLERANCES = {"bf16": 8e-2, "fp16": 2e-2, "fp32": 1e-3}

Convert = Callable[..., object]  # of a model, for an image size


def sweep(
    name: str,
    convert: Convert,
    *,
    sizes: list[tuple[int, int]],
    batches: list[int],
    dtype: str,
    device: torch.device,
    passes: tuple[str, ...] = PASSES,
    modes: tuple[str, ...] = MODES[:2],
    args: dict[str, Any] | None = None,
    done: frozenset[tuple[Any, ...]] = frozenset(),
    budget: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: for each size, pass and mode the softmax model, then the converted one."""
    if dtype not in DTYPES:
        raise unknown("precision", dtype, DTYPES)
    if "graph" in modes and device.type != "cuda":
        raise LinvitError("graph needs a CUDA device: use eager or compiled")
    random_model(name, sizes[0], args or {}, convert)  # what cannot be converted is told before anything is measured
    for (size, batch), which, mode in product(zip(sizes, batches, strict=True), passes, modes):
        softmax = partial(random_model, name, size, args or {})
        models = {"softmax": softmax, "converted": partial(softmax, convert)}
        pixels = size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"
        setting = {"resolution": pixels, "batch": batch, "pass": which, "mode": mode}
        rows = [row for attention in models if key(row := {**setting, "attention": attention}) not in done]
        yield from measure(rows, models, size, dtype, device, budget)
        clock.clean(device)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in KEY)


def random_model(name: str, size: tuple[int, int], args: dict[str, Any], convert: Convert | None = None) -> nn.Module:
    """The timm model with random weights (speed does not ask for better ones), converted if told so."""
    import timm

    if name not in timm.list_models():
        raise unknown("timm model", name, timm.list_models())
    torch.manual_seed(0)
    try:
        with told(size):
            model = timm.create_model(name, img_size=size[0] if size[0] == size[1] else size, **args)
    except TypeError:  # convolutional pyramids take any size and no such argument
        model = timm.create_model(name, **args)
    if convert is not None:
        convert(model, size=size)
    return model


def measure(
    rows: list[dict[str, Any]],
    models: Mapping[str, Callable[[], nn.Module]],
    size: tuple[int, int],
    dtype: str,
    device: torch.device,
    budget: float,
) -> list[dict[str, Any]]:
    """The rows of one setting, a model each: the error of the logits first, then peak memory, and last the times of all
    that are right, by turns; or why there are none."""
    ready: list[tuple[dict[str, Any], Callable[[], object]]] = []
    for row in rows:
        try:
            run, error = prepare(row, models[row["attention"]]().to(device), size, dtype)
            row |= {"status": "wrong" if run is None else "ok", "error": min(error, 1e30)}
            if run is not None:
                row["peak_bytes"] = clock.peak_memory(run, device)
                ready.append((row, run))
        except LinvitError:
            raise
        except Exception as error:  # a setting that fails must not cost those that are still to come
            row |= failure(error)
    try:
        calls = [clock.record([run]) if row["mode"] == "graph" else run for row, run in ready]
        for (row, _), timing in zip(ready, clock.by_turns(calls, device, budget=budget) if calls else [], strict=True):
            row |= {"images_per_second": row["batch"] / timing.median * 1e3, "ms": asdict(timing)}
    except Exception as error:
        for row, _ in ready:
            row |= failure(error)
    return rows


def prepare(
    row: dict[str, Any], model: nn.Module, size: tuple[int, int], dtype: str
) -> tuple[Callable[[], Tensor] | None, float]:
    """What is to be timed, warm, unless it is wrong; and the error of its logits."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(row["batch"], 3, *size, generator=generator, device=device)
    truth, compiled = exact_logits(model, images[:1]), row["mode"] != "eager"
    if row["pass"] == "inference":
        run = inference_call(model, images, dtype, compiled=compiled)
        error = relative_rms(run()[:1], truth)
    else:
        with torch.no_grad():
            error = relative_rms(autocast_logits(model.eval(), images[:1], dtype), truth)
        forward: Callable[[Tensor], Tensor] = model.train()
        if compiled:
            plain = autocast_logits(model, images, dtype).detach()
            forward = torch.compile(model, dynamic=False)
            error = max(error, relative_rms(autocast_logits(forward, images, dtype).detach(), plain))
        run = training_call(model, images, dtype, forward=forward, recorded=row["mode"] == "graph")
        run()
        if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            error = float("inf")
    if not error <= TOLERANCES[dtype]:
        return None, error
    for _ in range(3):
        run()
    model.zero_grad(set_to_none=True)  # a step's gradients count as its own
    return run, error


def inference_call(model: nn.Module, images: Tensor, dtype: str, *, compiled: bool = False) -> Callable[[], Tensor]:
    """The model's answer to the images, all of it in the dtype."""
    model, images = model.eval().to(DTYPES[dtype]), images.to(DTYPES[dtype])
    forward = torch.compile(model, dynamic=False) if compiled else model

    def infer() -> Tensor:
        with torch.inference_mode():
            return forward(images)

    return infer


def training_call(
    model: nn.Module,
    images: Tensor,
    dtype: str,
    *,
    forward: Callable[[Tensor], Tensor] | None = None,
    recorded: bool = False,
) -> Callable[[], Tensor]:
    """A training step on the images; `forward` is the model's compiled form, where there is one, and `recorded` makes a
    step that a CUDA graph can hold."""
    model.train()
    labels = torch.arange(len(images), device=images.device)
    fused = True if images.is_cuda else None  # as any training there has it: the plain one is all launches
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=recorded, fused=fused)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        logits = autocast_logits(model if forward is None else forward, images, dtype)
        loss = F.cross_entropy(logits, labels % logits.shape[-1])
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def autocast_logits(forward: Callable[[Tensor], Tensor], images: Tensor, dtype: str) -> Tensor:
    with torch.autocast(images.device.type, dtype=DTYPES[dtype], enabled=dtype != "fp32"):
        return forward(images).float()


def exact_logits(model: nn.Module, images: Tensor) -> Tensor:
    """The same weights in float64, every mechanism on its plain reference."""
    twin = copy.deepcopy(model).double().eval()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
    with torch.inference_mode():
        return twin(images.double())


def compare_models(result: dict[str, Any]) -> list[dict[str, Any]]:
    """For each resolution, pass and mode: images per second of both, their ratio, and the ratio of the peaks."""
    groups: defaultdict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in result["rows"]:
        groups[key(row)[:-1]][row["attention"]] = row
    lines = []
    for setting, rows in groups.items():
        line: dict[str, Any] = dict(zip(KEY, setting, strict=False)) | {"rows": rows}
        line["ratio"] = line["memory_ratio"] = None
        if len(rows) == 2 and all(row["status"] == "ok" for row in rows.values()):
            softmax, converted = rows["softmax"], rows["converted"]
            line["ratio"] = converted["images_per_second"] / softmax["images_per_second"]
            line["memory_ratio"] = converted["peak_bytes"] / softmax["peak_bytes"]
        lines.append(line)
    return lines
