"""`bench op`: one mechanism's speed and memory beside SDPA, its own reference and the memory floor, in one run.

Every implementation first shows that it is right, against float64; one that is not gets no time printed. Forward runs
in evaluation mode and forward+backward in training mode, where a BatchNorm takes its statistics from the batch. Inputs
are views of one packed `(batch, tokens, 3, heads, head_dim)` projection and the output is taken up to what the output
projection reads, because that is what a model pays for; so is the gradient, which ends in one packed tensor.

The floor counts each byte once, for E = batch · heads · tokens · head_dim elements: forward reads q, k and v and writes
the output, 4E. Forward and backward together, 11E: backward reads q, k, v and the output's gradient and writes three
gradients, and nothing of the forward can still be in the cache by then. A bias, `(1, heads, tokens, tokens)` and
learned as in Swin, is read in both and its gradient written.
"""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import clock
from linvit.attention import Mechanism, TokenGrid, create_attention
from linvit.errors import LinvitError, unknown

OTHERS = ("sdpa", "reference", "compiled")
IMPLEMENTATIONS = ("ours", *OTHERS)
PASSES = ("forward", "forward+backward")
KEY = ("batch", "heads", "head_dim", "tokens", "bias", "implementation", "pass")
ELEMENTS = {"forward": 4, "forward+backward": 11}
BIASES = {"forward": 1, "forward+backward": 3}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HALF = {"output": 5e-3, "gradient": 1e-2}
# Relative RMS against float64 of the same rounded inputs.
TOLERANCES = {"bf16": HALF, "fp16": HALF, "fp32": {"output": 1e-3, "gradient": 1e-3}}
CHECKED_BYTES = 4 * 2**30
ROOMY = 24 * 2**30  # memory that PyTorch may keep between two rows; giving it back and fetching it again takes time

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v and the block's input x


@dataclass(frozen=True)
class OpShape:
    batch: int
    heads: int
    head_dim: int
    tokens: int
    bias: bool = False

    @property
    def elements(self) -> int:
        return self.batch * self.heads * self.head_dim * self.tokens

    @property
    def grid(self) -> TokenGrid:
        """The squarest grid of that many tokens, for mechanisms that look at it."""
        height = next(h for h in range(math.isqrt(self.tokens), 0, -1) if self.tokens % h == 0)
        return TokenGrid(height, self.tokens // height)

    def __str__(self) -> str:
        return f"{self.batch}, {self.heads}, {self.head_dim}, {self.tokens}{', bias' if self.bias else ''}"


def shapes(batch: list[int], heads: list[int], head_dim: list[int], tokens: list[int]) -> list[OpShape]:
    """The grid of shapes, little work first: an interrupted run has measured the most."""
    every = [OpShape(b, h, d, n) for b in batch for h in heads for d in head_dim for n in tokens]
    return sorted(every, key=lambda s: (s.elements * s.tokens, s.elements, s.batch))


PRESETS: dict[str, list[OpShape]] = {
    "deit": shapes([64], [6], [64], [196, 784, 3136, 12544]),
    "grid": shapes([1, 8, 64], [3, 6, 12], [16, 32, 64], [196, 256, 576, 784, 1024, 3136, 4096, 12544]),
    "cpu": shapes([1], [6], [64], [196, 576, 1024, 2304, 4096]),
    # Heads of every width beside few and many of them, even and odd token counts: fixed before anything was measured.
    "kernels": [
        OpShape(*sizes)
        for sizes in (
            *((8, 6, 64, 197), (64, 3, 64, 196), (256, 6, 64, 197), (256, 3, 32, 256), (8, 12, 96, 256)),
            *((1, 6, 64, 577), (32, 6, 64, 577), (64, 16, 72, 577), (8, 16, 80, 577), (1, 16, 128, 1024)),
            *((16, 12, 80, 1025), (8, 16, 72, 1024), (64, 3, 96, 1369), (8, 12, 64, 1369), (64, 6, 64, 1024)),
            *((1, 12, 64, 4097), (8, 6, 128, 4097), (8, 12, 32, 4097), (1, 16, 72, 4097), (1, 6, 64, 16384)),
        )
    ],
}


def floor_ms(shape: OpShape, which: str, dtype: str, bandwidth: float) -> float:
    """The least time the fewest bytes take at the bandwidth measured in the same run."""
    numbers = ELEMENTS[which] * shape.elements
    if shape.bias:
        numbers += BIASES[which] * shape.heads * shape.tokens**2
    return numbers * DTYPES[dtype].itemsize / bandwidth * 1e3


@dataclass(frozen=True)
class Implementation:
    """One way to attend, and the float64 truth it is held against."""

    attend: Attention
    exact: Attention
    parameters: tuple[Tensor, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    why_reference: Callable[[Tensor, Tensor, Tensor, Tensor], str | None] = lambda q, k, v, x: None

    def set_mode(self, which: str) -> None:
        """Evaluation for forward alone, training with backward."""
        for module in self.modules:
            module.train(which != "forward")

    @property
    def mixes(self) -> bool:
        """Whether an image's output depends on the others of its batch."""
        inside = (part for module in self.modules for part in module.modules())
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in inside)


def implementations(
    mechanism: str, options: dict[str, Any], shape: OpShape, device: torch.device
) -> dict[str, Callable[[], Implementation]]:
    """What is compared. Built when its turn comes: compiling is dear and may fail."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"heads": shape.heads, "head_dim": shape.head_dim, "grid": shape.grid}
    ours = create_attention(mechanism, **sizes, **options).to(device)
    plain = create_attention(mechanism, **sizes, **options, impl="reference").to(device)
    truth = create_attention(mechanism, **sizes, **options, impl="reference").to(device).double()
    start = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    if shape.bias and not ours.capabilities.bias:
        raise LinvitError(f"{mechanism} cannot honour a bias on the logits")
    size = (1, shape.heads, shape.tokens, shape.tokens)
    bias = nn.Parameter(torch.randn(size, device=device)) if shape.bias else None
    learned = () if bias is None else (bias,)

    def ask(answer: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Any:
        return answer(q, k, v, shape.grid, bias=bias, x=x if ours.capabilities.input else None)

    def attend(module: Mechanism, *given: Tensor) -> Tensor:
        return _merge(ask(module, *given))

    exact = partial(attend, truth)

    def running(module: Mechanism, compiled: bool = False) -> Implementation:
        for one in (module, truth):  # training moves the running statistics of a norm
            one.load_state_dict(start)
        attention: Attention = partial(attend, module)
        if compiled:
            torch._dynamo.reset()
            attention = torch.compile(attention, dynamic=False)
        return Implementation(attention, exact, (*module.parameters(), *learned), (module, truth))

    return {
        "ours": lambda: replace(running(ours), why_reference=partial(ask, ours.why_reference)),
        "sdpa": lambda: Implementation(partial(_sdpa, bias), partial(_softmax, bias), learned),
        "reference": lambda: running(plain),
        "compiled": lambda: running(plain, compiled=True),
    }


def _sdpa(bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    mask = None if bias is None else bias.to(q.dtype)
    return _merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def _softmax(bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Written out, one head at a time: the N×N matrix of one head in float64 is enough."""

    def head(h: int) -> Tensor:
        logits = q[:, h] @ k[:, h].transpose(-2, -1) * q.shape[-1] ** -0.5
        return (logits if bias is None else logits + bias[:, h]).softmax(-1) @ v[:, h]

    return _merge(torch.stack([head(h) for h in range(q.shape[1])], 1))


def _merge(out: Tensor) -> Tensor:
    """What the output projection reads: `(batch, tokens, channels)`, a view if the memory lies that way."""
    return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Inputs:
    """One set: the packed projection, the block's input and the output's gradient."""

    packed: Tensor
    x: Tensor
    gradient: Tensor

    @classmethod
    def draw(cls, shape: OpShape, dtype: str, device: torch.device, seed: int) -> "Inputs":
        generator, outer = torch.Generator(device).manual_seed(seed), (shape.batch, shape.tokens)
        sizes = [(*outer, 3, shape.heads, shape.head_dim), *[(*outer, shape.heads * shape.head_dim)] * 2]
        return cls(*(torch.randn(size, generator=generator, device=device).to(DTYPES[dtype]) for size in sizes))

    def first(self, batch: int) -> "Inputs":
        """The first few images, in float64."""
        return Inputs(*(tensor[:batch].double() for tensor in (self.packed, self.x, self.gradient)))

    def call(self, attend: Attention, which: str, parameters: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """One pass: the output, and in forward+backward the gradient of the packed projection and of the rest."""
        if which == "forward":
            with torch.no_grad():
                return (attend(*self.unpacked(self.packed), self.x),)
        packed = self.packed.detach().requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        out = attend(*self.unpacked(packed), self.x)
        out.backward(self.gradient)  # as in training; `autograd.grad` would have the views' gradients stacked
        return (out, *(leaf.grad for leaf in (packed, *parameters) if leaf.grad is not None))

    @staticmethod
    def unpacked(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


Truths = dict[tuple[Attention, str], tuple[Tensor, ...]]  # of one shape, by what is exact and the pass


def check(
    implementation: Implementation, inputs: Inputs, shape: OpShape, which: str, truths: Truths
) -> dict[str, float]:
    """Relative RMS error against float64: of the output, and of the packed gradient. If images do not mix, a few do.

    `truths` keeps what float64 says of a shape, for the implementations that are still to come.
    """
    per_image = 4 * shape.heads * shape.tokens * max(shape.tokens, 16 * shape.head_dim) * 8
    some = shape.batch if implementation.mixes else max(1, min(shape.batch, CHECKED_BYTES // per_image))
    ours = inputs.call(implementation.attend, which, implementation.parameters)
    asked = (implementation.exact, which)
    if asked not in truths:
        truths[asked] = tuple(t.detach() for t in inputs.first(some).call(implementation.exact, which)[:2])
    pairs = zip(HALF, ours, truths[asked], strict=False)
    errors = {name: relative_rms(o[:some], t) for name, o, t in pairs}
    if not all(bool(o.isfinite().all()) for o in ours[:2]):
        errors["output"] = math.inf
    return errors


def relative_rms(ours: Tensor, truth: Tensor) -> float:
    """‖ours − truth‖ / ‖truth‖; infinite where ours is NaN."""
    ours, truth = ours.detach(), truth.detach()
    error = (ours.double() - truth).pow(2).mean() / truth.pow(2).mean().clamp_min(1e-300)
    return float(error.sqrt().nan_to_num(nan=math.inf))


def measure(
    make: Callable[[], Implementation],
    shape: OpShape,
    which: str,
    dtype: str,
    device: torch.device,
    truths: Truths,
    budget: float,
) -> dict[str, Any]:
    """What a row says: errors first, then times and memory, or why there are none."""
    try:
        implementation = make()
        implementation.set_mode(which)
        inputs = Inputs.draw(shape, dtype, device, seed=0)
        errors = check(implementation, inputs, shape, which, truths)
        if any(not error <= TOLERANCES[dtype][name] for name, error in errors.items()):
            return {"status": "wrong", "errors": {n: min(e, 1e30) for n, e in errors.items()}}
        reason = implementation.why_reference(*inputs.unpacked(inputs.packed), inputs.x)
        del inputs
        row: dict[str, Any] = {"status": "ok", "errors": errors}
        row |= {} if reason is None else {"why_reference": reason}
        count = clock.sets_for(4 * shape.elements * DTYPES[dtype].itemsize, device)
        sets = [Inputs.draw(shape, dtype, device, seed) for seed in range(count)]
        calls = [partial(s.call, implementation.attend, which, implementation.parameters) for s in sets]
        row |= {"peak_bytes": clock.peak_memory(calls[0], device), "input_sets": count}
        if device.type == "cpu":
            return row | {"eager_ms": asdict(clock.eager(calls, device, budget=budget))}
        row["graph_ms"] = asdict(clock.graph(calls, budget=budget))
        row["eager_ms"] = asdict(clock.eager(calls, device, budget=max(0.015, budget / 4), least=2))
        return row
    except LinvitError:
        raise
    except Exception as error:  # a compiler or a driver that fails must not cost the rows that are still to come
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """Why there is no speed."""
    if isinstance(error, torch.OutOfMemoryError):
        gc.collect()
        return {"status": "out of memory"}
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def sweep(
    mechanism: str,
    over: list[OpShape],
    *,
    dtype: str,
    device: torch.device,
    passes: tuple[str, ...] = PASSES,
    compared: tuple[str, ...] = IMPLEMENTATIONS,
    options: dict[str, Any] | None = None,
    done: frozenset[tuple[Any, ...]] = frozenset(),
    budget: float = 0.2,
    make: Callable[..., dict[str, Callable[[], Implementation]]] = implementations,
) -> Iterator[dict[str, Any]]:
    """Rows, as they are measured; `done` holds the keys of those a resumed run has already."""
    if dtype not in DTYPES:
        raise unknown("precision", dtype, DTYPES)
    for shape in over:
        rows = [{**asdict(shape), "implementation": name, "pass": which} for name in compared for which in passes]
        rows = [row for row in rows if key(row) not in done]
        if not rows:
            continue
        found, truths = make(mechanism, options or {}, shape, device), Truths()
        for row in rows:
            made = found[row["implementation"]]
            yield row | measure(made, shape, row["pass"], dtype, device, truths, budget)
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > ROOMY:
                torch.cuda.empty_cache()


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in KEY)


def time_of(row: dict[str, Any]) -> float | None:
    """The median that counts: of the graph where there is one, else of plain calls. None where the check was red."""
    return float(row.get("graph_ms", row["eager_ms"])["median"]) if row["status"] == "ok" else None


def compare_op(result: dict[str, Any]) -> list[dict[str, Any]]:
    """For each shape and pass: the floor, our time over it, and how many times faster we are than each other."""
    groups: defaultdict[tuple[OpShape, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in result["rows"]:
        shape = OpShape(row["batch"], row["heads"], row["head_dim"], row["tokens"], row.get("bias", False))
        groups[shape, row["pass"]][row["implementation"]] = row
    lines = []
    for (shape, which), rows in groups.items():
        times = {name: time_of(row) for name, row in rows.items()}
        floor, ours = floor_ms(shape, which, result["dtype"], result["bandwidth"]), times.get("ours")
        line: dict[str, Any] = {"shape": shape, "pass": which, "floor_ms": floor, "ms": times, "rows": rows}
        line["times_floor"] = ours / floor if ours else None
        line["faster_than"] = {name: time / ours if ours and (time := times.get(name)) else None for name in OTHERS}
        lines.append(line)
    return lines
