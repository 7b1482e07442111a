"""The papers' models on timm architectures: built by name, shared weights in place, any size, features."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.conversion import find_hosts
from linvit.conversion.host import Host

PAPERS = ("qtvit", "mixa", "mobile", "castling", "hydra")
NAMES = [name for name in linvit.list_models() if name.startswith(PAPERS)]
SMALLEST = {
    "qtvit_1": ("efficientvit_b1", {}),
    "mixa_deit_tiny_p14": ("deit_tiny_patch16_224", {"patch_size": 14}),
    "mixa_swin_tiny_w14": ("swin_tiny_patch4_window7_224", {"window_size": 14}),
    "mobile_deit_tiny": ("deit_tiny_patch16_224", {}),
    "mobile_pvt_v2_b0": ("pvt_v2_b0", {}),
    "mobile_efficientformerv2_s0": ("efficientformerv2_s0", {}),
    "castling_levit_128": ("levit_128", {}),
    "castling_mvitv2_tiny": ("mvitv2_tiny", {}),
    "castling_deit_tiny_distilled": ("deit_tiny_distilled_patch16_224", {}),
}


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


def test_every_family_is_there() -> None:
    count = {paper: sum(name.startswith(paper) for name in NAMES) for paper in PAPERS}
    assert count == {"qtvit": 12, "mixa": 4, "mobile": 13, "castling": 13, "hydra": 1}


@pytest.mark.parametrize("name", NAMES)
def test_builds_and_takes_any_size(name: str) -> None:
    model = on_meta(name, num_classes=5)
    hosts = find_hosts(model)
    assert hosts and all(isinstance(module, Host) for _, module in hosts)
    assert model(torch.empty(2, 3, 320, 256, device="meta")).shape == (2, 5)  # at 224 px their MACs are counted
    assert model.pretrained_cfg["architecture"] == name and model.pretrained_cfg["num_classes"] == 5


@pytest.mark.parametrize("name", SMALLEST)
def test_softmax_checkpoint_of_the_base_loads(name: str) -> None:
    base, options = SMALLEST[name]
    torch.manual_seed(0)
    checkpoint = timm.create_model(base, **options).state_dict()
    model = timm.create_model(name)
    missing, unexpected = model.load_state_dict(checkpoint, strict=False)
    assert all(".mechanism." in key for key in missing)
    assert all("bias" in key or "rel_pos" in key or ".sr." in key or ".norm." in key for key in unexpected), unexpected
    state = model.state_dict()
    shared = checkpoint.keys() & state.keys()
    assert len(shared) >= len(checkpoint) - len(unexpected) - 50
    assert all(torch.equal(state[key], checkpoint[key]) for key in shared)


@pytest.mark.parametrize("name", SMALLEST)
def test_features_only(name: str) -> None:
    model = on_meta(name, features_only=True)
    features = model(torch.empty(1, 3, 224, 224, device="meta"))
    assert len(features) >= 3
    for feature, reduction in zip(features, model.feature_info.reduction(), strict=True):
        assert tuple(feature.shape).count(-(-224 // reduction)) == 2
    assert any(isinstance(module, Host) for module in model.modules())


def test_mixa_takes_any_set_of_layers() -> None:
    model = on_meta("mixa_deit_tiny_p14", keep=(2, 5, 11))
    kinds = [block.attn.mechanism.name for block in model.blocks]
    assert [i for i, kind in enumerate(kinds) if kind == "relu_quadratic"] == [2, 5, 11]
    assert model.patch_embed.grid_size == (16, 16)
    swin = on_meta("mixa_swin_small_w14")
    assert sum(m.mechanism.name == "relu_quadratic" for m in swin.modules() if isinstance(m, Host)) == 6
    assert swin.layers[0].blocks[0].window_size == (14, 14) and swin.layers[3].blocks[0].window_size == (7, 7)


def test_qtvit_at_another_training_size() -> None:
    tables = [
        p.shape[-1] for n, p in on_meta("qtvit_1", img_size=288).named_parameters() if n.endswith("position.table")
    ]
    assert tables == [18] * 3 + [9] * 4


def test_trains_one_step_at_odd_size() -> None:
    torch.manual_seed(0)
    model = timm.create_model("mixa_deit_tiny_p14", num_classes=3, depth=2, keep=1, embed_dim=48)
    model(torch.randn(2, 3, 75, 100)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_no_published_weights_is_said_in_one_line() -> None:
    with pytest.raises(
        linvit.LinvitError, match="no weights are published for qtvit_1: start from softmax ones"
    ) as error:
        timm.create_model("qtvit_1", pretrained=True)
    assert "\n" not in str(error.value)


def test_qtvit_begins_as_in_its_code() -> None:
    """Small weights, no biases, and residual branches that add nothing at first."""
    model = timm.create_model("qtvit_1")
    host = model.stages[2].blocks[1].context_module.main
    assert host.proj.norm.weight.abs().max() == 0 and host.mechanism.scale.unique().tolist() == [1]
    assert model.stages[2].blocks[1].local_module.main.point_conv.norm.weight.abs().max() == 0
    assert model.stages[2].blocks[0].main.point_conv.norm.weight.unique().tolist() == [1]  # no residual
    assert host.qkv.conv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert host.qkv.conv.weight.abs().max() <= 2
    assert all(m.bias.abs().max() == 0 for m in model.modules() if isinstance(m, nn.Conv2d) and m.bias is not None)
