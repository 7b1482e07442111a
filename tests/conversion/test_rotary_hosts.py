"""Models with rotary position: converted without giving it up, and relative still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit.attention import list_mechanisms
from linvit.conversion import convert
from tests.attention.cases import relative_rms

MODELS = {
    "vit_small_patch16_dinov3": {},
    "vit_small_plus_patch16_dinov3_qkvb": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "eva02_base_patch14_448": {"patch_size": 16},
    "vit_pe_core_tiny_patch16_384": {},
    "vit_pe_spatial_tiny_patch16_512": {},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_rope_ape_224": {},
    "vit_medium_patch16_rope_reg1_gap_256": {},
}
REFUSED = {"fastformer", "hydra", "mobile", "performer", "xca"}  # nothing of theirs that could be turned
every = pytest.mark.parametrize("name", MODELS)


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5, "dynamic_img_size": True}
    model = timm.create_model(name, **{**small, **MODELS[name], **options})
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def image(size: int = 64) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@every
def test_converts_without_giving_rotary_position_up(name: str) -> None:
    for plan in ("relu_linear", "elu_linear", "stella", "qt", "castling", "pola"):
        model = build(name)
        report = convert(model, plan)
        assert all(layer.after.startswith(plan) and not layer.dropped for layer in report.layers)
        for size in (64, 96):
            out = model(image(size))
            assert out.isfinite().all()
        out.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mechanism", list_mechanisms())
def test_every_mechanism_takes_it_or_says_so(mechanism: str) -> None:
    model = build("vit_small_patch16_dinov3")
    if mechanism in REFUSED:
        with pytest.raises(linvit.LinvitError, match=f"{mechanism} cannot honour the rotary .* drop=") as error:
            convert(model, mechanism)
        assert "\n" not in str(error.value)
        assert {layer.dropped for layer in convert(model, mechanism, drop="rotary").layers} == {("rotary",)}
    else:
        report = convert(model, mechanism)
        assert {layer.dropped for layer in report.layers} == {()}
    with torch.no_grad():
        assert model(image()).isfinite().all()


def move(model: Any) -> None:
    """Let every place lie further down and right, by turning all angles alike."""
    embed = model.rope.get_embed
    half = model.blocks[0].attn.rotate_half

    def moved(*args: Any, **kwargs: Any) -> Tensor:
        sin, cos = embed(*args, **kwargs).chunk(2, dim=-1)
        pairs = torch.linspace(-1, 2, sin.shape[-1] // 2)
        turn = torch.cat((pairs, pairs)) if half else pairs.repeat_interleave(2)
        return torch.cat((sin * turn.cos() + cos * turn.sin(), cos * turn.cos() - sin * turn.sin()), dim=-1)

    model.rope.get_embed = moved


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "vit_small_patch16_rope_mixed_224"]
)
@pytest.mark.parametrize("plan", ["softmax", "relu_linear", "qt", "hedgehog", "castling"])
def test_position_is_relative_in_the_whole_model(name: str, plan: str) -> None:
    """In patches alone, where no class token stands still."""
    model = build(name, class_token=False, num_reg_tokens=0, global_pool="avg", use_abs_pos_emb=False)
    convert(model, plan)
    with torch.no_grad():
        before = model(image())
        move(model)
        assert relative_rms(model(image()), before) < 1e-4


def test_rotating_before_the_feature_map_is_the_old_way(tmp_path: Path) -> None:
    """It has to be dropped by name, sees absolute places, and is saved."""
    options = {"class_token": False, "num_reg_tokens": 0, "global_pool": "avg"}
    model = build("vit_small_patch16_dinov3", **options)
    with pytest.raises(linvit.LinvitError, match="relu_linear cannot honour the rotary"):
        convert(model, "relu_linear", rotary="before")
    convert(model, "relu_linear", rotary="before", drop="rotary")
    with torch.no_grad():
        before = model(image())
        linvit.save(model, tmp_path / "saved", model_args={**options, "dynamic_img_size": True})
        torch.testing.assert_close(linvit.load(tmp_path / "saved")(image()), before)
        move(model)
        assert relative_rms(model(image()), before) > 1e-3
