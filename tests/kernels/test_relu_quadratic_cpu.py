"""The CPU's tiles of ReLU-quadratic attention against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linvit.clock import peak_memory
from linvit.kernels.relu_quadratic import cpu as on_tiles
from linvit.kernels.relu_quadratic import on_cpu
from tests.kernels.quadratic_reference import LIMITS, draw, error, reference


@pytest.mark.parametrize(
    "tokens, keys, dtype", [(300, 600, torch.float32), (70, 90, torch.float16), (7, 7, torch.bfloat16)]
)
@pytest.mark.parametrize("numbers", [64, 2**20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("images", [None, 1, 2], ids=["plain", "shared bias", "bias"])
def test_tiles(
    tokens: int, keys: int, dtype: torch.dtype, numbers: int, masked: bool, images: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Small tiles, over memory full of NaN: single heads and all together, ragged ends."""
    for name, value in {"ROWS": 64, "COLUMNS": 48, "TILE_NUMBERS": numbers}.items():
        monkeypatch.setattr(on_tiles, name, value)
    rows_like, new_empty = on_tiles.rows_like, Tensor.new_empty
    monkeypatch.setattr(on_tiles, "rows_like", lambda *a: rows_like(*a).fill_(float("nan")))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    cpu = torch.device("cpu")
    q, k, v = draw(cpu, dtype, 2, 2, tokens, 8), draw(cpu, dtype, 2, 2, keys, 8), draw(cpu, dtype, 2, 2, keys, 12)
    mask = draw(cpu, torch.float32, 2, keys) > -1 if masked else None
    bias = None if images is None else draw(cpu, dtype, images, 2, tokens, keys, seed=6)
    grad = draw(cpu, dtype, 2, 2, tokens, 12, seed=5)
    exact = [t.double().requires_grad_() for t in (q, k, v, *([] if bias is None else [bias]))]
    truth = reference(*exact[:3], mask, *exact[3:])
    assert error(on_tiles.forward(q, k, v, mask, bias), truth) < LIMITS[dtype]
    found = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    d_bias = on_tiles.backward(grad, q, k, v, *found, mask, bias, bias is not None)
    found += [] if d_bias is None else [d_bias]
    for ours, exactly in zip(found, torch.autograd.grad(truth, exact, grad.double()), strict=True):
        assert error(ours, exactly) < LIMITS[dtype]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    "tokens, dtype, tiled", [(49, torch.float32, 0), (65, torch.float32, 1), (49, torch.float16, 1)]
)
def test_few_tokens_are_not_tiled(
    images: int, tokens: int, dtype: torch.dtype, tiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, calls = torch.device("cpu"), []
    forward = on_tiles.forward
    monkeypatch.setattr(on_tiles, "forward", lambda *a: calls.append(1) or forward(*a))
    monkeypatch.setattr("linvit.kernels.fused.interpreted", lambda: False)
    packed = draw(cpu, dtype, images, tokens, 3, 2, 8).requires_grad_()
    out = on_cpu(*packed.permute(2, 0, 3, 1, 4).unbind(0), None)
    assert out is not None and len(calls) == tiled
    exact = packed.detach().double().requires_grad_()
    truth = reference(*exact.permute(2, 0, 3, 1, 4).unbind(0), None)
    grad = draw(cpu, dtype, *out.shape, seed=5)
    assert error(out, truth) < LIMITS[dtype]
    found, wanted = (torch.autograd.grad(o, x, grad.to(o.dtype))[0] for o, x in ((out, packed), (truth, exact)))
    assert error(found, wanted) < LIMITS[dtype]


def test_memory_is_linear() -> None:
    cpu = torch.device("cpu")

    def peak(tokens: int) -> int:
        q, k, v, grad = (draw(cpu, torch.float32, 1, 2, tokens, 16, seed=s) for s in range(4))

        def both() -> None:
            on_tiles.forward(q, k, v, None)
            on_tiles.backward(grad, q, k, v, *(torch.empty_like(t) for t in (q, k, v)), None)

        return peak_memory(both, cpu)

    assert peak(4096) < 2.2 * peak(2048)
