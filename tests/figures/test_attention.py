"""What is seen of a model's attention: rows against hand-made ones, windows in their place, numbers of known maps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit.attention import TokenGrid
from linvit.errors import LinvitError
from linvit.figures.attention import Rows, Seen, look
from linvit.figures.attention.statistics import spread_queries
from tests.attention.test_rows import Largest
from tests.conversion.families import FAMILIES


def small_vit(size: tuple[int, int] = (48, 80), plan: str = "") -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": size, "num_classes": 5}
    model = timm.create_model("deit_tiny_distilled_patch16_224", **options).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if plan:
        linvit.convert(model, plan, size=size)
    return model


def family(name: str) -> tuple[nn.Module, Tensor]:
    found = next(f for f in FAMILIES if f.model == name)
    torch.manual_seed(1)
    return found.build(), found.image(batch=1)


def test_rows_of_timms_own_attention() -> None:
    model, image = small_vit(), torch.randn(1, 3, 48, 80)
    kept: dict[str, Tensor] = {}
    model.blocks[1].attn.qkv.register_forward_hook(lambda m, a, out: kept.update(qkv=out))
    before = model(image)
    seen = look(model, image)
    assert [layer.mechanism.name for layer in seen.layers] == ["softmax"] * 2 and seen.size == (48, 80)
    assert torch.equal(model(image), before) and type(model.blocks[0].attn).__module__.startswith("timm")
    q, k, _ = kept["qkv"].reshape(1, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
    expected = (q @ k.mT / 4).softmax(-1)[0]
    layer = seen.layer(-1)
    assert layer.grid == TokenGrid(3, 5, 2) and layer.name == "blocks.1.attn"
    torch.testing.assert_close(layer.row(4), expected[:, 4])
    torch.testing.assert_close(layer.pooled(), expected.mean(1))
    torch.testing.assert_close(layer.picture(layer.row(4)), expected[:, 4, 2:].unflatten(-1, (3, 5)))
    assert layer.at(79, 47, seen.size) == 16 and layer.at(0, 0, seen.size) == 2 and layer.at(16, 15.9, seen.size) == 3
    assert layer.class_token() == 0


@pytest.mark.parametrize("plan", ["", "stella", "mobile", "castling"])
def test_rollout_is_the_product_of_the_maps(plan: str) -> None:
    model, image = small_vit(plan=plan), torch.randn(1, 3, 48, 80)
    seen = look(model, image)
    expected = torch.eye(17)
    for layer in seen.layers:
        whole = torch.stack([layer.row(query).mean(0) for query in range(17)])
        torch.testing.assert_close(layer.rows(range(17)).mean(0), whole)
        sums = whole.sum(-1, keepdim=True)
        assert plan != "" or torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
        expected = 0.5 * (torch.where(sums > 0, whole / sums, whole) + torch.eye(17)) @ expected
    layer = seen.layer(1)
    torch.testing.assert_close(seen.rollout(layer, layer.one(3)), expected[3], rtol=1e-4, atol=1e-6)


def test_a_larger_image_takes_memory_in_proportion() -> None:
    """4,096 tokens: one forward, a row, all queries together and a rollout, without a tensor of N² entries."""
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=2, embed_dim=16, num_heads=1, patch_size=4, img_size=256, num_classes=0
    ).eval()
    linvit.convert(model, linvit.Plan("mixed", None, (linvit.Rule(linvit.Choice("stella"), layers=(1,)),)))
    with Largest() as memory:
        seen = look(model, torch.randn(1, 3, 256, 256))
        layer = seen.layer(-1)
        seen.rollout(layer, layer.one(5))
        seen.layer(0).pooled()
        Rows(layer, seen.size).statistics()
    assert layer.grid.tokens == 4097 and memory.elements < 4097**2 / 4


def support(model: nn.Module, seen: Seen, block: nn.Module, name: str, place: tuple[int, int], order: Any) -> Tensor:
    """Where in a block's input the output at a place depends on anything, found by its gradient: `(height, width)`."""
    kept: dict[str, Tensor] = {}

    def enter(module: nn.Module, args: Any) -> Any:
        kept["x"] = args[0].detach().requires_grad_()
        return (kept["x"], *args[1:])

    def leave(module: nn.Module, args: Any, out: Tensor) -> None:
        kept["out"] = out

    handles = [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    model(torch.randn(1, 3, *seen.size))
    for handle in handles:
        handle.remove()
    out = order(kept["out"])
    (gradient,) = torch.autograd.grad(out[0, place[0], place[1]].sum(), kept["x"])
    return order(gradient, True)[0].abs().sum(-1) > 0


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "sam2_hiera_tiny"])
def test_windows_lie_where_the_block_looks(name: str) -> None:
    """Shifted, padded and with pooled queries: a row reaches exactly what the block's output depends on."""
    model, image = family(name)
    seen = look(model, image)
    windowed = [layer for layer in seen.layers if layer.windows > 1]
    assert len(windowed) > 1
    for layer in windowed:
        block = model.get_submodule(layer.name.rpartition(".")[0])
        row, column = layer.grid.height - 1, layer.grid.width // 2
        query = row * layer.grid.width + column
        found = layer.picture(layer.row(query).abs().sum(0)) > 1e-12
        seen_by_block = support(model, seen, block, layer.name, (row, column), lambda x, back=False: x)
        assert 1 < int(found.sum()) < found.numel()
        if "swin" not in name or not layer.given.get("bias", torch.zeros(1)).lt(-50).any():
            assert torch.equal(found, seen_by_block), layer.name
        else:  # a shift mask leaves next to nothing of what is wrapped round
            assert bool((found <= seen_by_block).all())


def test_hiera_keeps_its_tokens_in_another_order() -> None:
    model, image = family("hiera_tiny_224")
    seen = look(model, image)
    for index, layer in enumerate(seen.layers):
        block = model.blocks[index]
        before = index - 1 if layer.grid != layer.key_grid else index

        def order(x: Tensor, back: bool = False, index: int = index, before: int = before) -> Tensor:
            return model.reroll(x, before if back else index)

        row, column = layer.grid.height - 1, layer.grid.width - 1
        found = layer.picture(layer.row(row * layer.grid.width + column).abs().sum(0)) > 1e-12
        assert torch.equal(found, support(model, seen, block, layer.name, (row, column), order)), layer.name


def test_converted_windows_take_the_same_places() -> None:
    model, image = family("swin_tiny_patch4_window7_224")
    whole = look(model, image)
    linvit.convert(model, "relu_linear", drop=("relative_bias", "shift_mask"))
    seen = look(model, image)
    row, first = seen.layer(0).row(20), whole.layer(0).row(20)
    assert torch.equal(row.sum(0) > 0, first.sum(0) > 0)
    torch.testing.assert_close(row.sum(-1), torch.ones(seen.layer(0).heads))
    assert Rows(seen.layer(0), seen.size).distance_to(Rows(whole.layer(0), seen.size)) is not None


def test_what_mixes_channels_shows_what_the_output_depends_on() -> None:
    model, image = family("xcit_nano_12_p16_224")
    layer = look(model, image).layer(0)
    row = layer.row(5)
    assert layer.mechanism.name == "xca" and "has no map" in layer.note
    assert row.shape == (layer.heads, 16) and bool((row > 0).all()) and int(row.sum(0).argmax()) == 5


def test_notes_name_what_a_map_leaves_out() -> None:
    image = torch.randn(1, 3, 48, 80)
    assert look(small_vit(), image).layer(0).note == ""
    assert "output norm" in look(small_vit(plan="castling"), image).layer(0).note
    model = small_vit()
    linvit.convert(model, "stella", local=3, size=(48, 80))
    assert look(model, image).layer(0).note == "without its local filter"


def test_numbers_of_known_maps() -> None:
    model, image = small_vit(), torch.randn(1, 3, 48, 80)
    attn = model.blocks[0].attn
    attn.qkv.weight.data[:64] = 0  # no logits: every key alike
    attn.qkv.bias.data[:64] = 0
    seen = look(model, image)
    first, other = Rows(seen.layer(0), seen.size), Rows(seen.layer(1), seen.size)
    even = first.statistics()
    assert even.entropy == pytest.approx(math.log(17)) and even.effective_rank == pytest.approx(1.0)
    centres = torch.cartesian_prod(torch.arange(3) * 16.0, torch.arange(5) * 16.0)
    assert even.distance == pytest.approx(float(torch.cdist(centres, centres).mean()))
    same, apart = other.distance_to(other), other.distance_to(first)
    assert same is not None and same.total_variation == 0 and same.cosine == pytest.approx(1.0)
    mine = torch.stack([other.layer.row(query) for query in range(2, 17)], dim=1)
    assert apart is not None and apart.total_variation == pytest.approx(float((mine - 1 / 17).abs().sum(-1).mean() / 2))
    assert spread_queries(TokenGrid(40, 30, 1), 32)[0] > 0 and len(set(spread_queries(TokenGrid(40, 30), 32))) == 32
    assert other.rows.shape == (2, 15, 17)


@pytest.mark.parametrize("name", ["nest_tiny", "mobilevit_xxs"])
def test_windows_without_a_place_are_an_error(name: str) -> None:
    model, image = family(name)
    layer = look(model, image).layer(0)
    assert not layer.placed
    with pytest.raises(LinvitError, match="choose another layer"):
        layer.row(0)


def test_mistakes_are_told() -> None:
    seen = look(small_vit(), torch.randn(1, 3, 48, 80))
    for mistake, words in (
        (lambda: seen.layer(2), "there is no layer 2: the model has 0 to 1"),
        (lambda: seen.layer("blocks.7"), "unknown layer 'blocks.7'"),
        (lambda: seen.layer(0).at(80, 3, seen.size), "80,3 is outside the picture"),
        (lambda: look(small_vit(), torch.randn(2, 3, 48, 80)), "look takes one image"),
        (lambda: look(small_vit(), torch.randn(1, 3, 20, 20)), "cannot take images of 20×20"),
        (lambda: look(nn.Conv2d(3, 3, 1), torch.randn(1, 3, 8, 8)), "has no attention"),
    ):
        with pytest.raises(LinvitError, match=words):
            mistake()
