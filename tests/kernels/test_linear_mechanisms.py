"""Every linear mechanism through the fused kernel gives what its reference gives, or says why it cannot."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import linvit
from linvit.attention import TokenGrid, create_attention
from linvit.attention.linear import LinearAttention
from linvit.errors import LinvitError
from tests.attention.cases import Case, call, cases, inputs, relative_rms
from tests.kernels.conftest import ON_GPU

GRID = TokenGrid(4, 6)
CASES = [case for case in cases() if isinstance(case.build(GRID), LinearAttention)]
every = pytest.mark.parametrize("case", CASES, ids=str)
WITHOUT = {"hydra", "mhla", "pola"}  # mechanisms whose core is more than the kernel's formula


def run(case: Case, impl: str, tensors: tuple[Tensor, ...], mask: Tensor | None) -> list[Tensor]:
    """The output and the gradients of q, k, v and all parameters."""
    mechanism = case.build(GRID, impl=impl).to(tensors[0].device)
    out = call(mechanism, tensors, GRID, mask=mask)
    leaves = [*tensors[:3], *mechanism.parameters()]
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device)
    found = torch.autograd.grad((out.float() * weight).sin().sum(), leaves, allow_unused=True)
    return [out, *(grad for grad in found if grad is not None)]


@every
@pytest.mark.parametrize("masked", [False, True])
def test_kernel_and_reference_agree(case: Case, masked: bool, device: torch.device) -> None:
    tensors = tuple(t.to(device).requires_grad_() for t in inputs(GRID))
    mask = torch.ones(2, GRID.tokens, dtype=torch.bool, device=device)
    mask[1, -5:] = False
    if case.name in WITHOUT:
        with pytest.raises(LinvitError, match="Triton"):
            run(case, "triton", tensors, None)
        return
    found, wanted = (run(case, impl, tensors, mask if masked else None) for impl in ("triton", "reference"))
    for one, other in zip(found, wanted, strict=True):
        assert relative_rms(one, other) < 1e-4


@pytest.mark.parametrize("name", ["stella", "taylor", "relu_linear", "efficient", "mobile", "relu_quadratic"])
def test_the_edges_on_the_kernels(name: str, device: torch.device) -> None:
    """No key at all is zero, a masked key of NaN does not leak, and float16 holds large numbers."""
    mechanism = Case(name).build(GRID, impl="triton").to(device)
    q, k, v, x = (t.to(device) for t in inputs(GRID))
    mask = torch.arange(GRID.tokens, device=device) < torch.tensor([[0], [20]], device=device)
    k, v = (t.masked_fill(~mask[:, None, :, None], float("nan")) for t in (k, v))
    tensors = tuple(t.requires_grad_() for t in (q, k, v, x))
    out = call(mechanism, tensors, GRID, mask=mask)
    assert not out[0].any() and out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), tensors[:3]))
    large = tuple(t.to(device) for t in inputs(GRID, dtype=torch.float16, scale=100.0))
    for _ in range(2):  # the second call takes the short way
        assert call(mechanism, large, GRID).isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_castling_trains_with_its_softmax_branch_beside_the_kernel(
    dtype: torch.dtype, masked: bool, device: torch.device
) -> None:
    tensors = tuple(t.to(device).requires_grad_() for t in inputs(GRID, dtype=dtype)[:3])
    exact = tuple(t.detach().double().requires_grad_() for t in tensors)
    mask = torch.ones(2, GRID.tokens, dtype=torch.bool, device=device)
    mask[1, -5:] = False
    found = []
    for given, impl in ((tensors, "triton"), (exact, "reference")):
        mechanism = Case("castling", {"sparse": True, "threshold": 0.0}).build(GRID, dtype=given[0].dtype, impl=impl)
        out = mechanism.to(device).train()(*given, GRID, mask=mask if masked else None)
        weight = torch.linspace(-1, 1, out.shape[-1], device=device, dtype=out.dtype)
        found.append([out, *torch.autograd.grad((out * weight).sum(), given)])
    for one, other in zip(*found, strict=True):
        assert relative_rms(one, other) < (1e-4 if dtype == torch.float32 else 2e-2)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    if case.name in WITHOUT:
        return
    tensors = tuple(t.to(device) for t in inputs(GRID, dtype=dtype))
    with torch.no_grad():
        out = call(case.build(GRID, impl="triton").to(device), tensors, GRID)
        exactly = case.build(GRID, dtype=torch.float64, impl="reference").to(device)
        exact = call(exactly, tuple(t.double() for t in tensors), GRID)
    assert out.dtype == dtype
    assert relative_rms(out, exact) < (2e-3 if dtype == torch.float16 else 8e-3)


def test_auto_takes_the_kernel_where_it_can_and_triton_says_why_not(device: torch.device) -> None:
    q, k, v, _ = (t.to(device) for t in inputs(GRID))
    with torch.no_grad():
        assert create_attention("stella")(q, k, v).transpose(1, 2).is_contiguous()  # the kernel's own layout
        assert create_attention("stella")(q.double(), k.double(), v.double()).dtype == torch.float64
        with pytest.raises(LinvitError, match="float64"):
            create_attention("stella", impl="triton")(q.double(), k.double(), v.double())
        with pytest.raises(LinvitError, match="Triton kernel"):
            create_attention("hydra", impl="triton")(q, k, v)


def test_the_short_way_of_a_known_call(device: torch.device) -> None:
    """A second call like the first skips the checks, and nothing that they would have found."""
    stella = create_attention("stella").to(device)
    q, k, v, _ = (t.to(device) for t in inputs(GRID))
    first = stella(q, k, v, GRID)
    assert len(stella.known) == 1
    assert torch.equal(stella(q, k, v, GRID), first) and torch.equal(stella(q, k, v), first)
    with pytest.raises(LinvitError, match="tokens"):
        stella(q, k, v, TokenGrid(5, 5))
    with pytest.raises(LinvitError, match="fit together"):
        stella(q, k[:, :, 1:], v, GRID)
    mask = torch.ones(2, GRID.tokens, dtype=torch.bool, device=device)
    mask[:, 4:] = False
    assert not torch.equal(stella(q, k, v, GRID, mask=mask), first)
    stella.impl = "reference"
    assert not stella(q, k, v, GRID).transpose(1, 2).is_contiguous()
    local = create_attention("focused", heads=2, head_dim=8, grid=GRID).to(device)
    local(q, k, v, GRID)
    assert not local.known


@pytest.mark.parametrize("name", ["stella", "elu_linear", "castling", "qt", "efficient"])
def test_compiles_as_one_graph_with_gradients(name: str, device: torch.device) -> None:
    mechanism = create_attention(name, heads=2, head_dim=8, impl="triton").to(device)
    qkv = torch.randn(2, 24, 3, 2, 8, device=device, requires_grad=True)

    def loss(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return mechanism(q, k, v, TokenGrid(4, 6)).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    (found,), (wanted,) = (torch.autograd.grad(run(qkv), qkv) for run in (compiled, loss))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["castling", "focused"])
def test_compiles_for_sizes_it_does_not_know(name: str, device: torch.device) -> None:
    mechanism = create_attention(name, heads=2, head_dim=8, grid=GRID, impl="triton").to(device)
    torch._dynamo.reset()
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for grid in (GRID, TokenGrid(5, 3)):
            q, k, v, _ = (t.to(device) for t in inputs(grid))
            torch.testing.assert_close(compiled(q, k, v, grid), mechanism(q, k, v, grid))


def test_eager_calls_leave_a_compiled_one_alone(device: torch.device) -> None:
    """What an eager call remembers is none of a compiler's business: it would compile again for each."""
    stella, counter = create_attention("stella", impl="triton").to(device), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(stella, backend=counter, dynamic=False)
    with torch.no_grad():
        for grid in (GRID, TokenGrid(2, 3), TokenGrid(3, 3)):
            stella(*(t.to(device) for t in inputs(grid)[:3]))
            compiled(*(t.to(device) for t in inputs(GRID)[:3]))
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_saves_no_more_for_its_training_than_with_softmax(compiled: bool, device: torch.device) -> None:
    def saved(plan: str | None) -> int:
        torch._dynamo.reset()
        sizes = {"img_size": 80, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 1}
        model = timm.create_model("vit_tiny_patch16_224", **sizes).to(device)
        if plan is not None:
            linvit.convert(model, plan)
        run = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False) if compiled else model
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(torch.ones(2, 3, 80, 80, device=device))
        return sum(kept.values())

    assert 0 < saved("stella") <= saved(None)
