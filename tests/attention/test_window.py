"""Window attention against a brute-force masked softmax, pair by pair from where the tokens sit."""

from __future__ import annotations

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor

from linvit.attention import Mechanism, Size, TokenGrid, create_attention
from linvit.errors import LinvitError
from tests.attention.cases import Case, inputs

CASES = [
    (TokenGrid(6, 9), {"window": 3}),
    (TokenGrid(6, 9), {"window": 3, "shift": True}),
    (TokenGrid(6, 9, 1), {"window": 3, "shift": 2}),
    (TokenGrid(5, 7), {"window": 3}),
    (TokenGrid(5, 7, 2), {"window": 3, "shift": True}),
    (TokenGrid(7, 8), {"window": (4, 3), "shift": True}),
    (TokenGrid(4, 4), {"window": 3, "shift": 1}),  # the last shifted window is all padding but for what wraps
    (TokenGrid(3, 10), {"window": 4, "shift": True}),  # shrinks down the column, shifts along the row
    (TokenGrid(3, 4, 1), {"window": 4, "shift": True}),  # no longer than the window: one window, no shift
    (TokenGrid(2, 2), {}),
]


def cell(place: int, side: int, window: int, shift: int) -> int:
    """Which window of one axis a place falls into: the first `shift` places are a window of their own."""
    if side <= window:
        return 0
    return (place - shift) // window


def brute_force(
    grid: TokenGrid,
    q: Tensor,
    k: Tensor,
    window: tuple[int, int],
    shift: tuple[int, int],
    table: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """The N×N map of one picture's heads, one pair at a time."""
    heads, tokens, width = q.shape
    logits = torch.full((heads, tokens, tokens), float("-inf"), dtype=torch.float64)
    places = [None] * grid.prefix + [(r, c) for r in range(grid.height) for c in range(grid.width)]
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            if mask is not None and not mask[j]:
                continue
            near = a is None or b is None
            if a is not None and b is not None:
                near = all(
                    cell(a[n], side, window[n], shift[n]) == cell(b[n], side, window[n], shift[n])
                    for n, side in enumerate((grid.height, grid.width))
                )
            if not near:
                continue
            for h in range(heads):
                logits[h, i, j] = q[h, i] @ k[h, j] / width**0.5
                if table is not None and a is not None and b is not None:
                    row, column = a[0] - b[0] + window[0] - 1, a[1] - b[1] + window[1] - 1
                    logits[h, i, j] += table[row * (2 * window[1] - 1) + column, h]
    return logits.softmax(-1)


def sides(mechanism: Mechanism) -> tuple[tuple[int, int], tuple[int, int]]:
    return (mechanism.height, mechanism.width), mechanism.shift


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("grid, options", CASES, ids=str)
def test_against_brute_force(grid: TokenGrid, options: dict, bias: bool) -> None:
    mechanism = Case("window", {**options, "bias": bias}).build(grid, dtype=torch.float64)
    q, k, v, _ = inputs(grid, batch=1, value_dim=5, dtype=torch.float64)
    table = mechanism.table.detach() if bias else None
    expected = brute_force(grid, q[0], k[0], *sides(mechanism), table)
    torch.testing.assert_close(mechanism.map(q, k, grid)[0], expected)
    torch.testing.assert_close(mechanism(q, k, v, grid)[0], expected @ v[0])
    mechanism.impl = "reference"
    torch.testing.assert_close(mechanism(q, k, v, grid)[0], expected @ v[0])


@pytest.mark.parametrize("prefix", [0, 1])
def test_masked_keys_against_brute_force(prefix: int) -> None:
    grid = TokenGrid(5, 5, prefix)
    mechanism = create_attention("window", window=2, shift=True)
    q, k, v, _ = inputs(grid, batch=1, dtype=torch.float64)
    mask = torch.rand(1, grid.tokens, generator=torch.Generator().manual_seed(0)) < 0.6
    expected = brute_force(grid, q[0], k[0], *sides(mechanism), None, mask[0])
    sees = expected.isfinite().all(-1)[0]  # a masked token may have nothing left to see
    out = mechanism(q, k, v, grid, mask=mask)
    torch.testing.assert_close(out[0][:, sees], (expected @ v[0])[:, sees])
    assert (out[0][:, ~sees] == 0).all() and bool(sees[mask[0]].all())


@pytest.mark.parametrize("grid, options", CASES, ids=str)
def test_gradients_of_the_fused_path(grid: TokenGrid, options: dict) -> None:
    """Padding that sees nothing must not poison them."""
    found = []
    for impl in ("auto", "reference"):
        mechanism = Case("window", {**options, "bias": True}).build(grid, dtype=torch.float64, impl=impl)
        q, k, v = (t.requires_grad_() for t in inputs(grid, dtype=torch.float64)[:3])
        mechanism(q, k, v, grid).square().sum().backward()
        found.append([t.grad for t in (q, k, v, mechanism.table)])
    torch.testing.assert_close(*found)
    assert all(gradient.isfinite().all() for gradient in found[0])


def test_one_window_is_softmax() -> None:
    grid = TokenGrid(5, 7, 2)
    q, k, v, _ = inputs(grid, dtype=torch.float64)
    expected = create_attention("softmax", impl="reference")(q, k, v)
    torch.testing.assert_close(create_attention("window", shift=True)(q, k, v, grid), expected)


@pytest.mark.parametrize(
    "sizes, windows, total", [((56, 28, 14, 7), (7, 7, 7, 7), 140.14), ((32, 16, 8, 4), (8, 8, 8, 4), 57.41)]
)
def test_macs_of_the_fair_comparison(sizes: tuple[int, ...], windows: tuple[int, ...], total: float) -> None:
    macs = 0
    for side, window, depth, heads in zip(sizes, windows, (2, 2, 6, 2), (3, 6, 12, 24), strict=True):
        grid = TokenGrid(side, side)
        macs += depth * create_attention("window", window=window).macs(Size(1, heads, 32, 32, grid, grid))
    assert round(macs / 1e6, 2) == total


def test_against_timm() -> None:
    """A shifted Swin block with its table. Only on a grid that divides: timm shifts before it pads and lets some
    wrapped tokens see strangers otherwise."""
    torch.manual_seed(0)
    block = SwinTransformerBlock(16, (8, 12), num_heads=2, window_size=4, shift_size=2).double().eval()
    x = torch.randn(2, 8, 12, 16, dtype=torch.float64)
    ours = create_attention("window", heads=2, head_dim=8, window=4, shift=True, bias=True).double()
    ours.table.data = block.attn.relative_position_bias_table.data
    q, k, v = block.attn.qkv(x).reshape(2, 96, 3, 2, 8).permute(2, 0, 3, 1, 4)
    out = block.attn.proj(ours(q, k, v, TokenGrid(8, 12)).transpose(1, 2).reshape(2, 8, 12, 16))
    torch.testing.assert_close(out, block._attn(x))


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 3, "shift": 3}, {"shift": -1}], ids=str)
def test_impossible_windows_are_refused(options: dict) -> None:
    with pytest.raises(LinvitError, match="window"):
        create_attention("window", **options)
