"""`bench model`: a timm model with softmax attention against its converted self, side by side in one run.

The softmax model is timm's own, with its fused SDPA. Inference runs in the chosen dtype; a training step is forward,
cross-entropy, backward and AdamW under autocast with float32 weights. Both models are first held against their own
float64 selves on one image, a compiled training step against the eager one; one that is off gets no speed. The mode
`graph` is the compiled model replayed as a CUDA graph, by the device's own clock: what the host needs to send the work
is not in it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism
from linvit.errors import LinvitError, unknown
from linvit.measurement import clock
from linvit.measurement.speed import DTYPES, relative_rms

PASSES = ("inference", "training")
MODES = ("eager", "compiled", "graph")
# Relative RMS of the logits against float64. Half precision rounds after every layer, and a dozen of them add up.
TOLERANCES = {"bf16": 8e-2, "fp16": 2e-2, "fp32": 1e-3}

Convert = Callable[[nn.Module], object]


def sweep(
    name: str,
    convert: Convert,
    *,
    resolutions: list[int],
    batches: list[int],
    dtype: str,
    device: torch.device,
    passes: tuple[str, ...] = PASSES,
    modes: tuple[str, ...] = MODES[:2],
    args: dict[str, Any] | None = None,
    done: frozenset[tuple[Any, ...]] = frozenset(),
    budget: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: for each resolution, pass and mode the softmax model, then the converted one."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if "graph" in modes and device.type != "cuda":
        raise LinvitError("the mode graph needs a CUDA device: use eager or compiled")
    build(name, resolutions[0], convert, args or {})  # what cannot be converted is told before anything is measured
    for resolution, batch in zip(resolutions, batches, strict=True):
        for which in passes:
            for mode in modes:
                for attention in ("softmax", "converted"):
                    row = {"resolution": resolution, "batch": batch, "pass": which}
                    row |= {"mode": mode, "attention": attention}
                    if key(row) not in done:
                        model = build(name, resolution, convert if attention == "converted" else None, args or {})
                        yield row | measure(model, row, dtype, device, budget=budget)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("resolution", "batch", "pass", "mode", "attention"))


def build(name: str, resolution: int, convert: Convert | None, args: dict[str, Any]) -> nn.Module:
    """The timm model with random weights (speed does not ask for better ones), converted if told so."""
    import timm

    if name not in timm.list_models():
        raise unknown("timm model", name, timm.list_models())
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=resolution, **args)
    except TypeError:  # convolutional pyramids take any size and no such argument
        model = timm.create_model(name, **args)
    if convert is not None:
        convert(model)
    return model


def measure(
    model: nn.Module, row: dict[str, Any], dtype: str, device: torch.device, *, budget: float = 1.0
) -> dict[str, Any]:
    """One row: the error of the logits first, then images per second and peak memory, or why there are none."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        images = torch.randn(row["batch"], 3, row["resolution"], row["resolution"], generator=generator, device=device)
        prepare = _training if row["pass"] == "training" else _inference
        run, error = prepare(model.to(device), row, dtype, images)
        if not error <= TOLERANCES[dtype]:
            return {"status": "wrong", "error": min(error, 1e30)}
        for _ in range(3):
            run()
        model.zero_grad(set_to_none=True)  # a step's gradients count as its own
        peak = clock.peak_memory(run, device)
        replayed = row["mode"] == "graph"
        timing = clock.graph([run], budget=budget) if replayed else clock.eager([run], device, budget=budget)
        speed = row["batch"] / timing.median * 1e3
        return {
            "status": "ok",
            "error": error,
            "images_per_second": speed,
            "ms": asdict(timing),
            "peak_bytes": peak,
        }
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except LinvitError:
        raise
    except Exception as reason:  # a compiler that fails must not cost the rows that are still to come
        return {"status": "failed", "reason": f"{type(reason).__name__}: {reason}".splitlines()[0][:300]}
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


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
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=recorded)

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
