"""The counters against formulas written out by hand, against a real run, and against known models."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from linvit.attention import Mechanism, Size, TokenGrid, create_attention
from linvit.errors import LinvitError
from linvit.measurement import count_macs, count_parameters, measure_macs


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


class Sdpa(nn.Module):
    """SDPA on pictures of one row: queries, keys and values are the channels."""

    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q = x.reshape(1, 2, 3, -1).transpose(2, 3)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=x.device) if self.mask else None
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Wrapped(nn.Module):
    """A mechanism between two linear layers."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.qkv, self.mechanism, self.proj = nn.Linear(8, 24), mechanism, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.mechanism(q, k, v, TokenGrid(5, 6)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("module", "size", "macs"),
    [
        (nn.Linear(7, 5), (3, 7), 3 * 7 * 5),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 8, 9), 8 * 9 * 6 * 2 * 9),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (4, 5, 5), 25 * 4 * 6 * 4),
        (Sdpa(), (6, 1, 7), 2 * 2 * 7 * 7 * 3),
        (Sdpa(mask=True), (6, 1, 7), 2 * 2 * 7 * 7 * 3),
        (nn.LayerNorm(7), (3, 7), 0),
    ],
)
def test_by_hand(module: nn.Module, size: tuple[int, ...], macs: int) -> None:
    assert count_macs(module, size) == macs


def test_products_with_vectors_count() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight) @ torch.ones(3, device=x.device)

    assert count_macs(Score(), (3, 7)) == 3 * 7 + 3


@pytest.mark.parametrize("name", ["softmax", "efficient", "stella", "qt", "relu_linear"])
def test_mechanisms_speak_by_their_formula(name: str) -> None:
    mechanism = create_attention(name, heads=2, head_dim=4)
    found = measure_macs(Wrapped(mechanism), (8, 5, 6))
    grid = TokenGrid(5, 6)
    assert found.attention == mechanism.macs(Size(1, 2, 4, 4, grid, grid))
    assert found.other == 30 * 8 * 32


def test_formula_takes_the_place_of_what_ran() -> None:
    class Free(Mechanism):
        name = "free"

        def core(self, q: Tensor, k: Tensor, v: Tensor, call: object) -> Tensor:
            return q @ k.transpose(-2, -1) @ v

        def macs(self, size: Size) -> int:
            return 11

    found = measure_macs(Wrapped(Free(create_attention("softmax").shape)), (8, 5, 6))
    assert (found.attention, found.other) == (11, 30 * 8 * 32)


@pytest.mark.parametrize("affine", [True, False])
def test_fvcore_convention_adds_norms(affine: bool) -> None:
    norms = nn.Sequential(
        nn.LayerNorm([6, 7], elementwise_affine=affine),
        nn.BatchNorm2d(4, affine=affine),
        nn.GroupNorm(2, 4, affine=affine),
    )
    assert count_macs(norms, (4, 6, 7)) == 0
    assert count_macs(norms, (4, 6, 7), "fvcore") == 3 * (5 if affine else 4) * 4 * 6 * 7


def test_functional_norm_counts_too() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], weight=torch.ones(x.shape[-1]))

    assert count_macs(Functional(), (3, 7), "fvcore") == 5 * 21


@pytest.mark.parametrize(
    ("name", "parameters", "gmacs"),
    [
        ("deit_tiny_patch16_224", 5_717_416, 1.2537),
        ("resnet50", 25_557_032, 4.0892),
        ("swin_tiny_patch4_window7_224", 28_288_354, 4.4906),
        ("efficientvit_b1", 9_102_024, 0.5192),
    ],
)
def test_known_models(name: str, parameters: int, gmacs: float) -> None:
    model = build(name)
    assert count_parameters(model) == parameters
    assert count_macs(model) / 1e9 == pytest.approx(gmacs, abs=1e-4)


def test_vit_by_formula() -> None:
    """DeiT-T: patches, 12 blocks of four projections and the two attention products, and the head."""
    tokens, dim = 197, 192
    block = tokens * dim * (4 * dim + 8 * dim) + 2 * tokens * tokens * dim
    assert count_macs(build("deit_tiny_patch16_224")) == 196 * 768 * dim + 12 * block + dim * 1000


@pytest.mark.parametrize("name", ["levit_128s", "fair_pyramid_p4_window", "efficientvit_b0", "pvt_v2_b0"])
def test_meta_and_real_runs_agree(name: str) -> None:
    model = timm.create_model(name, img_size=64) if "fair" in name else timm.create_model(name)
    size = (3, 64, 64) if "fair" in name else (3, 224, 224)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    dry = count_macs(model.train(), size)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(torch.randn(1, *size))
    assert dry == counter.get_total_flops() // 2


def test_custom_operators_need_a_formula() -> None:
    @torch.library.custom_op("linvit_test::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[1]))

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 5))

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.weight)

    with pytest.raises(LinvitError, match=r"cannot count linvit_test.product: .*register_flop_formula"):
        count_macs(Custom(), (3, 7))

    @register_flop_formula(torch.ops.linvit_test.product)
    def flops(a: tuple[int, ...], b: tuple[int, ...], **kwargs: object) -> int:
        return 2 * a[0] * a[1] * b[0] * b[1]

    assert count_macs(Custom(), (3, 7)) == 3 * 7 * 5


def test_what_needs_data_says_so() -> None:
    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(LinvitError, match="Peeks cannot run without data"):
        count_macs(Peeks(), (3, 4))


def test_unknown_convention() -> None:
    with pytest.raises(LinvitError, match="unknown convention 'flops'"):
        count_macs(nn.Linear(2, 2), (2,), "flops")


def test_parameters_trainable_shared_and_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert count_parameters(model) == 16 + 4 + 8 + 4
    assert count_parameters(model, without=nn.BatchNorm1d) == 16 + 4 + 4
    model[0].weight.requires_grad = False
    assert count_parameters(model) == 4 + 8 + 4


# M MACs inside the mechanisms of the Fair Comparison's pyramids, and around them
CORES = {
    4: {"sa": 4432.90, "la": 1107.28, "ea": 91.52, "xca": 91.52, "pa": 92.24, "aa": 5.72, "window": 140.14},
    7: {"sa": 472.65, "la": 118.16, "ea": 29.88, "xca": 29.88, "pa": 30.12, "aa": 1.87, "window": 57.41},
}
AROUND = {4: 4335.97 + 14.45 + 19.27, 7: 1416.35 + 14.45 + 6.29}
NORMALISED = {4: 3.726, 7: 1.217}


@pytest.mark.parametrize(("patch", "short"), [(patch, short) for patch in CORES for short in CORES[patch]])
def test_parts_of_the_fair_pyramid(patch: int, short: str) -> None:
    found = measure_macs(build(f"fair_pyramid_p{patch}_{short}"))
    assert found.attention / 1e6 == pytest.approx(CORES[patch][short], abs=0.006)
    assert found.other / 1e6 == pytest.approx(AROUND[patch], abs=0.02)
    assert found.normalised / 5e6 == pytest.approx(NORMALISED[patch], abs=0.0006)
