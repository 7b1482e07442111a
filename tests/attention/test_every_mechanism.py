"""What every registered mechanism must do. A new one is tested by being registered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention import Call, Mechanism, Size, TokenGrid, regroup
from linvit.errors import LinvitError
from tests.attention.cases import HEAD_DIM, HEADS, Case, call, cases, every, inputs, relative_rms, supported

GRIDS = [
    TokenGrid(1, 1),
    TokenGrid(1, 7),
    TokenGrid(7, 7),
    TokenGrid(14, 14, 1),
    TokenGrid(28, 28, 1),
    TokenGrid(5, 9, 5),
    TokenGrid(12, 3),
]


@every
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_any_grid_and_refusal_of_prefix(case: Case, grid: TokenGrid) -> None:
    tensors = inputs(grid)
    mechanism = case.build(grid)
    if grid.prefix and not mechanism.capabilities.prefix:
        with pytest.raises(LinvitError, match="prefix"):
            call(mechanism, tensors, grid)
        return
    out = call(mechanism, tensors, grid)
    assert out.shape == tensors[2].shape and out.dtype == torch.float32
    exact = call(copy.deepcopy(mechanism).double(), tuple(t.double() for t in tensors), grid)
    assert relative_rms(out, exact) < 1e-5


@every
def test_strides_do_not_matter(case: Case) -> None:
    grid = supported(case, TokenGrid(4, 6, 1))
    mechanism = case.build(grid)
    packed = torch.randn(2, grid.tokens, 3, 2, 8)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    x = torch.randn(2, grid.tokens, 16)
    assert not q.is_contiguous()
    out = call(mechanism, (q, k, v, x), grid)
    plain = call(mechanism, (q.contiguous(), k.contiguous(), v.contiguous(), x), grid)
    torch.testing.assert_close(out, plain)


@every
def test_gradients(case: Case) -> None:
    grid = supported(case, TokenGrid(2, 3, 1))
    mechanism = case.build(grid, dtype=torch.float64, head_dim=4, impl="reference")
    used = inputs(grid, batch=1, head_dim=4, dtype=torch.float64, seed=3)[: 4 if mechanism.capabilities.input else 3]
    tensors = [t.requires_grad_() for t in used]
    names = [n for n, p in mechanism.named_parameters() if p.requires_grad]
    parameters = [p for p in mechanism.parameters() if p.requires_grad]

    def through(*args: Tensor) -> Tensor:
        (q, k, v, *x), values = args[: len(tensors)], args[len(tensors) :]
        kwargs = {"x": x[0]} if x else {}
        return torch.func.functional_call(mechanism, dict(zip(names, values, strict=True)), (q, k, v, grid), kwargs)

    assert torch.autograd.gradcheck(through, (*tensors, *parameters), eps=1e-6, atol=1e-6, rtol=1e-4)


@every
def test_permutation_equivariance_is_as_declared(case: Case) -> None:
    grid = TokenGrid(3, 4)
    mechanism = case.build(grid, dtype=torch.float64)
    q, k, v, x = inputs(grid, dtype=torch.float64)
    order = torch.randperm(grid.tokens, generator=torch.Generator().manual_seed(1))
    permuted = call(mechanism, (q[:, :, order], k[:, :, order], v[:, :, order], x[:, order]), grid)
    same = relative_rms(permuted, call(mechanism, (q, k, v, x), grid)[:, :, order]) < 1e-9
    assert same == mechanism.capabilities.equivariant


@every
def test_products_are_all_that_is_known_of_q_and_k_as_declared(case: Case) -> None:
    """Turning q and k together changes nothing there, so rotary position of both stays relative."""
    grid = TokenGrid(4, 6)
    mechanism = case.build(grid, dtype=torch.float64)
    q, k, v, x = inputs(grid, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    turned = call(mechanism, (q @ turn, k @ turn, v, x), grid)
    same = relative_rms(turned, call(mechanism, (q, k, v, x), grid)) < 1e-9
    assert same == (mechanism.capabilities.rotary == "products")


@every
@pytest.mark.parametrize("key_grid", [None, TokenGrid(3, 2, 1)], ids=["equal", "pooled"])
def test_core_is_the_map_times_v(case: Case, key_grid: TokenGrid | None) -> None:
    grid = supported(case, TokenGrid(6, 4, 1))
    key_grid = None if key_grid is None else supported(case, key_grid)
    mechanism = case.build(key_grid or grid, dtype=torch.float64)
    can = mechanism.capabilities
    if key_grid is not None and not can.unequal:
        key_grid = None
    q, k, v, _ = inputs(grid, key_grid=key_grid, dtype=torch.float64)
    if not can.map:
        with pytest.raises(LinvitError, match="no map"):
            mechanism.map(q, k, grid, key_grid=key_grid)
        return
    implied = mechanism.map(q, k, grid, key_grid=key_grid)
    assert implied.shape[0] == 2 and implied.shape[2:] == (q.shape[2], k.shape[2])
    q, k, context = mechanism.enter(q, k, Call(grid, key_grid or grid))
    core = mechanism.core(q, k, v, context) - mechanism.core(q, k, torch.zeros_like(v), context)
    expected = regroup(implied @ regroup(v, implied.shape[1]), 2)
    assert relative_rms(core, expected) < 1e-9


@every
def test_macs_are_half_of_the_flop_counter(case: Case) -> None:
    grid, key_grid = supported(case, TokenGrid(6, 4, 1)), supported(case, TokenGrid(3, 2, 1))
    can = case.build(grid).capabilities
    key_grid = key_grid if can.unequal else grid
    value_dim = 12 if can.wide_values else 8
    mechanism = case.build(key_grid, value_dim=value_dim, impl="reference")
    tensors = inputs(grid, key_grid=key_grid, batch=3, value_dim=value_dim)
    with FlopCounterMode(display=False) as counter:
        call(mechanism, tensors, grid, key_grid=key_grid)
    assert 2 * mechanism.macs(Size(3, 2, 8, value_dim, grid, key_grid)) == counter.get_total_flops()


@every
@pytest.mark.parametrize("queries, keys", [((6, 8, 1), (3, 4, 1)), ((3, 4, 1), (6, 8, 1)), ((5, 7, 0), (3, 2, 0))])
def test_pooled_keys_and_subsampled_queries(case: Case, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    grid, key_grid = supported(case, TokenGrid(*queries)), supported(case, TokenGrid(*keys))
    mechanism = case.build(key_grid)
    tensors = inputs(grid, key_grid=key_grid)
    if not mechanism.capabilities.unequal:
        with pytest.raises(LinvitError, match="as many keys as queries"):
            call(mechanism, tensors, grid, key_grid=key_grid)
        return
    out = call(mechanism, tensors, grid, key_grid=key_grid)
    assert out.shape == tensors[0].shape and out.isfinite().all()


@every
@pytest.mark.parametrize("value_dim", [4, 16])
def test_values_of_another_width(case: Case, value_dim: int) -> None:
    grid = supported(case, TokenGrid(4, 6, 1))
    tensors = inputs(grid, value_dim=value_dim)
    if not case.build(grid).capabilities.wide_values:
        with pytest.raises(LinvitError, match="as wide as"):
            call(case.build(grid), tensors, grid)
        return
    out = call(case.build(grid, value_dim=value_dim), tensors, grid)
    assert out.shape == tensors[2].shape and out.isfinite().all()


@every
def test_key_mask_drops_keys(case: Case) -> None:
    """Masked keys and values may hold anything; nothing of it reaches the queries that stay."""
    grid = supported(case, TokenGrid(3, 4, 1))
    mechanism = case.build(grid, dtype=torch.float64)
    q, k, v, x = inputs(grid, dtype=torch.float64)
    mask = torch.ones(2, grid.tokens, dtype=torch.bool)
    mask[0, -2:] = False
    mask[1, -5:] = False
    if not mechanism.capabilities.key_mask:
        with pytest.raises(LinvitError, match="mask"):
            call(mechanism, (q, k, v, x), grid, mask=mask)
        return
    out = call(mechanism, (q, k, v, x), grid, mask=mask)
    noise = ~mask[:, None, :, None] * 7.0
    again = call(mechanism, (q, k + noise, v + noise, x), grid, mask=mask)
    far = (
        mask[:, None, :, None]
        if mechanism.capabilities.equivariant
        else mask[:, None, :, None] & (torch.arange(grid.tokens)[:, None] < 2)
    )
    torch.testing.assert_close(again * far, out * far)
    if mechanism.capabilities.map:
        implied = mechanism.map(q, k, grid, mask=mask)
        assert (implied.transpose(2, 3)[~mask[:, None, :].expand(-1, implied.shape[1], -1)].abs() < 1e-12).all()
    everything = call(mechanism, (q, k, v, x), grid, mask=torch.ones_like(mask))
    torch.testing.assert_close(everything, call(mechanism, (q, k, v, x), grid))


@every
def test_triton_is_never_replaced_in_silence(case: Case) -> None:
    """On the CPU no kernel can serve, so asking for one is an error."""
    grid = supported(case, TokenGrid(4, 4, 1))
    with pytest.raises(LinvitError, match="Triton kernel"):
        call(case.build(grid, impl="triton"), inputs(grid), grid)


class Fixed(nn.Module):
    """A mechanism with its grid, as a host holds it, for tracing."""

    def __init__(self, mechanism: Mechanism, grid: TokenGrid) -> None:
        super().__init__()
        self.mechanism, self.grid = mechanism, grid

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return self.mechanism(q, k, v, self.grid, x=x)


@every
def test_compiles_as_one_graph(case: Case) -> None:
    grid = supported(case, TokenGrid(4, 6, 1))
    module, tensors = Fixed(case.build(grid), grid), inputs(grid)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors), module(*tensors))


@pytest.mark.parametrize("name", ["stella", "castling"])
def test_compiles_with_the_real_backend(name: str) -> None:
    """Inductor, forward and backward, for one mechanism without and one with parameters."""
    grid = TokenGrid(4, 6, 1)
    module = Fixed(Case(name).build(grid), grid)
    outcomes = []
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True)):
        tensors = tuple(t.requires_grad_() for t in inputs(grid))
        out = run(*tensors)
        out.square().sum().backward()
        outcomes.append((out, *(t.grad for t in tensors[:3])))
    for plain, compiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(compiled, plain)


class OfPicture(nn.Module):
    """A mechanism behind a picture of any size, as in a backbone: prefix tokens are the picture's mean."""

    def __init__(self, mechanism: Mechanism, prefix: int) -> None:
        super().__init__()
        self.mechanism, self.prefix = mechanism, prefix

    def forward(self, picture: Tensor) -> Tensor:
        grid = TokenGrid(picture.shape[2], picture.shape[3], self.prefix)
        x = picture.flatten(2).transpose(1, 2)
        x = torch.cat([x.mean(1, keepdim=True)] * self.prefix + [x], dim=1)
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in (x.roll(1, 2), x.roll(2, 2), x))
        return self.mechanism(q, k, v, grid, x=x if self.mechanism.capabilities.input else None)


@every
def test_exports_with_another_batch_and_size(case: Case) -> None:
    """What an exporter is told may vary must vary in its program: the batch always, the size where the mechanism says
    so. `impl="reference"`, for which order of products is cheaper is a question to one size; and not at the size that
    positions are laid out for, at which they are not resized."""
    grid = supported(case, TokenGrid(6, 8, 1))
    module = OfPicture(case.build(grid, impl="reference"), grid.prefix)
    can, dims = module.mechanism.capabilities, {0: torch.export.Dim.DYNAMIC}
    shown, other = (2, HEADS * HEAD_DIM, 6, 8), (3, HEADS * HEAD_DIM, 6, 8)
    if can.any_tokens and can.dynamic:
        dims |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
        shown, other = (2, HEADS * HEAD_DIM, 7, 9), (3, HEADS * HEAD_DIM, 10, 5)
    exported = torch.export.export(module, (torch.randn(shown),), dynamic_shapes=(dims,)).module()
    picture = torch.randn(other)
    torch.testing.assert_close(exported(picture), module(picture))


@every
def test_traces(case: Case) -> None:
    """`torch.jit.trace` knows no operator of ours."""
    grid = supported(case, TokenGrid(4, 6, 1))
    module, tensors = Fixed(case.build(grid), grid), inputs(grid)
    traced = torch.jit.trace(module, tensors, check_trace=False)
    torch.testing.assert_close(traced(*tensors), module(*tensors))


@every
def test_state_dict_round_trip(case: Case, tmp_path) -> None:
    grid = supported(case, TokenGrid(4, 6, 1))
    first, second = case.build(grid), case.build(grid, seed=1)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    tensors = inputs(grid)
    assert torch.equal(call(first, tensors, grid), call(second, tensors, grid))


@every
def test_another_token_count(case: Case) -> None:
    """Built for one grid, called on another: served, or refused where the number of tokens is fixed."""
    grid, other = supported(case, TokenGrid(4, 4, 1)), supported(case, TokenGrid(5, 7, 1))
    mechanism = case.build(grid)
    if mechanism.capabilities.any_tokens:
        assert call(mechanism, inputs(other), other).isfinite().all()
    else:
        with pytest.raises(LinvitError, match="fixed to the"):
            call(mechanism, inputs(other), other)


@every
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    grid = supported(case, TokenGrid(4, 6, 1))
    mechanism = case.build(grid).train()
    tensors = tuple(t.requires_grad_() for t in inputs(grid))
    call(mechanism, tensors, grid).square().sum().backward()
    for name, parameter in mechanism.named_parameters():
        if parameter.requires_grad and not mechanism.capabilities.between:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert mechanism.capabilities.value == (tensors[2].grad is not None)


@pytest.mark.parametrize("case", [case for case in cases() if case.build(TokenGrid(2, 2)).capabilities.bias], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 24, 24), (2, 2, 24, 24), (4, 1, 24, 24), (24,)], ids=str)
def test_a_bias_is_repeated_and_learned(case: Case, shape: tuple[int, ...]) -> None:
    """Two images of a bias for four of q come again in turn, as the windows of shifted images do."""
    grid = TokenGrid(4, 6)
    mechanism = case.build(grid)
    q, k, v, x = inputs(grid, batch=4)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = bias[(None,) * (4 - bias.ndim)]
    whole = whole.repeat(4 // len(whole), 1, 1, 1).expand(4, 2, 24, 24)
    found = []
    for given in (bias, whole):
        given = given.clone().requires_grad_()
        out = mechanism(q, k, v, grid, bias=given, x=x if mechanism.capabilities.input else None)
        found.append((out, torch.autograd.grad(out.square().sum(), given)[0]))
    torch.testing.assert_close(found[0][0], found[1][0])
    by_image = found[1][1].unflatten(0, (-1, len(bias) if bias.ndim == 4 else 1)).sum(0)
    torch.testing.assert_close(found[0][1], by_image.sum_to_size(bias.shape))
