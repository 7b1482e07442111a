"""`bench model`: a timm model with softmax attention against its converted self, side by side in one run.

The softmax model is timm's own, with its fused SDPA. Inference runs in the chosen dtype; a training step is forward,
cross-entropy, backward and AdamW under autocast with float32 weights. Both models are first held against their own
float64 selves on one image, a compiled training step against the eager one; one that is off gets no speed. Then they
are timed by turns, so that whatever happens to the machine meantime happens to both. The mode `graph` is the compiled
model replayed as a CUDA graph, by the device's own clock: what the host needs to send the work is not in it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism
from linvit.errors import LinvitError, unknown
from linvit.measurement import clock
from linvit.measurement.speed import DTYPES, failure, relative_rms

PASSES = ("inference", "training")
MODES = ("eager", "compiled", "graph")
# Relative RMS of the logits against float64. Half precision rounds after every layer, and a dozen of them add up.
TOLERANCES = {"bf16": 8e-2, "fp16": 2e-2, "fp32": 1e-3}

Convert = Callable[[nn.Module], object]


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
        raise unknown("dtype", dtype, DTYPES)
    if "graph" in modes and device.type != "cuda":
        raise LinvitError("the mode graph needs a CUDA device: use eager or compiled")
    random_model(name, sizes[0], args or {}, convert)  # what cannot be converted is told before anything is measured
    for size, batch in zip(sizes, batches, strict=True):
        softmax = partial(random_model, name, size, args or {})
        models = {"softmax": softmax, "converted": partial(softmax, convert)}
        for which in passes:
            for mode in modes:
                setting = {"resolution": resolution(size), "batch": batch, "pass": which, "mode": mode}
                rows = [{**setting, "attention": attention} for attention in models]
                rows = [row for row in rows if key(row) not in done]
                yield from measure(rows, models, size, dtype, device, budget=budget)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in ("resolution", "batch", "pass", "mode", "attention"))


def resolution(size: tuple[int, int]) -> int | str:
    """A size as result files have it: 224, or 224x320."""
    return size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"


def random_model(name: str, size: tuple[int, int], args: dict[str, Any], convert: Convert | None = None) -> nn.Module:
    """The timm model with random weights (speed does not ask for better ones), converted if told so."""
    import timm

    if name not in timm.list_models():
        raise unknown("timm model", name, timm.list_models())
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=size[0] if size[0] == size[1] else size, **args)
    except TypeError:  # convolutional pyramids take any size and no such argument
        model = timm.create_model(name, **args)
    if convert is not None:
        convert(model)
    return model


def measure(
    rows: list[dict[str, Any]],
    models: Mapping[str, Callable[[], nn.Module]],
    size: tuple[int, int],
    dtype: str,
    device: torch.device,
    *,
    budget: float = 1.0,
) -> list[dict[str, Any]]:
    """The rows of one setting, a model each: the error of the logits first, then peak memory, and last the times of all
    that are right, by turns; or why there are none."""
    calls: list[Callable[[], object]] = []
    found: list[dict[str, Any]] = []
    try:
        for row in rows:
            run, result = prepare(row, models[row["attention"]], size, dtype, device)
            found.append(row | result)
            calls += [run] if run is not None else []
        right = [row for row in found if row["status"] == "ok"]
        try:
            times = timed(calls, rows[0]["mode"], device, budget) if calls else []
        except Exception as error:  # a setting that fails must not cost those that are still to come
            for row in right:
                row |= failure(error)
        else:
            for row, timing in zip(right, times, strict=True):
                row |= {"images_per_second": row["batch"] / timing.median * 1e3, "ms": asdict(timing)}
        return found
    finally:
        calls.clear()
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepare(
    row: dict[str, Any], make: Callable[[], nn.Module], size: tuple[int, int], dtype: str, device: torch.device
) -> tuple[Callable[[], object] | None, dict[str, Any]]:
    """What is to be timed, if it is right; its error and peak memory, or what is wrong."""
    try:
        model = make().to(device)
        generator = torch.Generator(device).manual_seed(0)
        images = torch.randn(row["batch"], 3, *size, generator=generator, device=device)
        run, error = (_training if row["pass"] == "training" else _inference)(model, row, dtype, images)
        if not error <= TOLERANCES[dtype]:
            return None, {"status": "wrong", "error": min(error, 1e30)}
        for _ in range(3):
            run()
        model.zero_grad(set_to_none=True)  # a step's gradients count as its own
        return run, {"status": "ok", "error": error, "peak_bytes": clock.peak_memory(run, device)}
    except LinvitError:
        raise
    except Exception as error:
        return None, failure(error)


def timed(calls: clock.Calls, mode: str, device: torch.device, budget: float) -> list[clock.Timing]:
    if mode == "graph":
        return [clock.graph([call], budget=budget) for call in calls]
    return clock.by_turns(calls, device, latency=False, budget=budget)


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


def _inference(model: nn.Module, row: dict[str, Any], dtype: str, images: Tensor) -> tuple[Callable[[], object], float]:
    truth = _exact_logits(model.eval(), images[:1])
    infer = inference_call(model, images, dtype, compiled=row["mode"] != "eager")
    return infer, relative_rms(infer()[:1], truth)


def _training(model: nn.Module, row: dict[str, Any], dtype: str, images: Tensor) -> tuple[Callable[[], object], float]:
    truth = _exact_logits(model.eval(), images[:1])
    with torch.no_grad():
        error = relative_rms(autocast_logits(model, images[:1], dtype), truth)
    forward: Callable[[Tensor], Tensor] = model.train()
    if row["mode"] != "eager":
        plain = autocast_logits(model, images, dtype).detach()
        forward = torch.compile(model, dynamic=False)
        error = max(error, relative_rms(autocast_logits(forward, images, dtype).detach(), plain))
    step = training_call(model, images, dtype, forward=forward, recorded=row["mode"] == "graph")
    step()
    if not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
        error = float("inf")
    return step, error


def _exact_logits(model: nn.Module, image: Tensor) -> Tensor:
    """The same weights in float64, every mechanism on its plain reference."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
    with torch.inference_mode():
        return twin(image.double())
