"""How PyTorch may use the fused linear attention: compiled, exported, under autocast, recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from linvit.errors import LinvitError
from linvit.kernels.linear import linear_attention, op, why_not
from linvit.kernels.linear.layout import layout_of
from tests.kernels.conftest import ON_GPU
from tests.kernels.linear_reference import FORMULAS, draw, inputs, reference


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8)
    mask, constant = draw(device, torch.float32, 2, 20) > 0, torch.tensor(0.5, device=device, requires_grad=True)
    rest = (mask, None, None, constant, None, None, *FORMULAS["qt"], True)
    if packed:
        qkv = draw(device, torch.float32, 2, 20, 3, 2, 8).requires_grad_()
        torch.library.opcheck(torch.ops.linvit.linear_attention_packed.default, (qkv, *rest))
    else:
        torch.library.opcheck(torch.ops.linvit.linear_attention.default, (*tensors, *rest))


def test_compiles_as_one_graph(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8)
    torch._dynamo.reset()
    backend = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(
        lambda q, k, v: linear_attention(q, k, v, FORMULAS["elu"]) * 2, fullgraph=True, backend=backend
    )
    found = torch.autograd.grad(compiled(*tensors).sin().sum(), tensors)
    wanted = torch.autograd.grad((linear_attention(*tensors, FORMULAS["elu"]) * 2).sin().sum(), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


class Packed(torch.nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return op.packed(qkv, (None,) * 6, FORMULAS["relu"])


def test_exports_with_any_number_of_tokens(device: torch.device) -> None:
    qkv, more = draw(device, torch.float32, 2, 20, 3, 2, 8), draw(device, torch.float32, 2, 31, 3, 2, 8)
    shapes = {"qkv": {1: torch.export.Dim("tokens", min=2, max=4096)}}
    exported = torch.export.export(Packed(), (qkv,), dynamic_shapes=shapes).module()
    assert torch.equal(exported(more), Packed()(more))


def test_autocast_and_checkpointing(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 1, 2, 20, 8)
    formula = FORMULAS["relu"]
    plain = torch.autograd.grad(linear_attention(*tensors, formula).sin().sum(), tensors)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = linear_attention(*tensors, formula)
    assert out.dtype == torch.float32
    again = checkpoint(lambda *t: linear_attention(*t, formula), *tensors, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again.sin().sum(), tensors), plain, strict=True):
        assert torch.equal(one, other)


def test_flops_are_those_of_the_reference(device: torch.device) -> None:
    tensors = inputs(device, torch.float32, 2, 2, 20, 8, 12, 4)
    counts = []
    for run in (linear_attention, reference):
        with FlopCounterMode(display=False) as counter:
            run(*tensors, FORMULAS["relu"])
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_says_why_it_cannot(device: torch.device) -> None:
    q, k, v = (t.detach() for t in inputs(device, torch.float32, 1, 2, 20, 8))
    formula = FORMULAS["relu"]
    assert why_not(q, k, v, formula) is None
    assert "float64" in str(why_not(q.double(), k.double(), v.double(), formula))
    assert "different types" in str(why_not(q, k, v.half(), formula))
    assert "too wide" in str(why_not(*(t.new_zeros(1, 1, 4, 600) for t in (q, k, v)), formula))
    assert "feature map" in str(why_not(q, k, v, formula._replace(feature="cosine")))
    assert "as many keys" in str(why_not(q, k[:, :, :9], v[:, :, :9], FORMULAS["angular"]))
    assert "empty" in str(why_not(q[:, :, :0], k, v, formula))
    assert "divided already" in str(why_not(q, k, v, FORMULAS["efficient"]._replace(row_sum=True)))
    apart = torch.empty(2**23 + 8, device=device).as_strided((1, 1, 2, 8), (0, 0, 2**23, 1))
    assert "further apart" in str(why_not(apart, apart, apart, formula))
    tensors = inputs(device, torch.float32, 1, 1, 2, 8)
    with pytest.raises(LinvitError, match="further apart"):
        torch.autograd.grad(linear_attention(*tensors, formula), tensors, apart)


def test_few_ways_to_lay_out_heads() -> None:
    widths = ((3, 1, 1), (6, 64, 64), (12, 32, 128), (5, 256, 256), (1, 3, 300), (64, 2, 2), (16, 72, 80), (4, 96, 96))
    for heads, dim, value_dim in widths:
        for itemsize in (2, 4):
            layout = layout_of(heads, dim, value_dim, itemsize)
            assert layout.keys >= dim * layout.group
            assert (layout.value_width + layout.value_rest) * layout.value_blocks >= value_dim
            assert layout.group * min(layout.key_width, layout.value_width) >= 16
            assert layout.numbers % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3, 196, 64), (8, 6, 784, 32), (1, 3, 4096, 64), (64, 6, 196, 64)])
def test_replays_from_a_graph(shape: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs(device, torch.bfloat16, *shape)

    def run() -> list[Tensor]:
        out = linear_attention(*tensors, FORMULAS["relu"])
        return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))
