"""Hugging Face's models, tiny and from their configs: nothing lost, softmax exact, any mechanism, saved and loaded."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.conversion import Choice, Plan, Rule, droppable, find_hosts
from linvit.conversion.convert import asks_of
from linvit.conversion.refusing import IN_TIMM
from tests.conversion.families import permitting
from tests.conversion.hugging import BY_NAME, CASES, SIDE, SMALL, Case, every, transformers

VIT = BY_NAME["ViTModel"]


def image(height: int = SIDE, width: int = SIDE) -> Tensor:
    return VIT.image(height, width)


def out(model: nn.Module, picture: Tensor, **call: Any) -> Tensor:
    return model(picture, **call).last_hidden_state


def close(one: Any, other: Any, noise: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=noise, atol=noise, check_dtype=False)


@every
def test_softmax_changes_nothing(case: Case) -> None:
    """Outputs, gradients and attentions, at the model's own size and at another that is not square."""
    original = case.build(attn_implementation="eager").double()
    converted = copy.deepcopy(original)
    report = linvit.convert(converted, "softmax")
    assert len(report.layers) == case.layers and report.new_parameters == 0 and not report.removed
    outputs = [case.out(model, case.image().double()) for model in (original, converted)]
    close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    after = dict(converted.named_parameters())
    grads = {name: p.grad for name, p in original.named_parameters() if p.grad is not None}
    noise = 1e-7 * max(float(grad.abs().max()) for grad in grads.values())  # eager softmax is computed in float32
    for name, grad in grads.items():
        torch.testing.assert_close(after[name].grad, grad, rtol=0, atol=1e-4 * float(grad.abs().max()) + noise)
    with torch.no_grad():
        if case.other is not None:
            close(*(case.out(model, case.image(*case.other).double()) for model in (original, converted)))
        if case.attentions:
            maps = [
                case.run(model, case.image().double(), output_attentions=True).attentions
                for model in (original, converted)
            ]
            assert len(maps[1]) == len(maps[0]) > 0
            close(maps[1], maps[0])


@every
def test_sdpa_is_matched_too(case: Case) -> None:
    original = case.build()
    converted = copy.deepcopy(original)
    linvit.convert(converted, "softmax")
    with torch.no_grad():
        close(case.out(converted), case.out(original), 1e-4)


@every
@pytest.mark.parametrize("plan", ["stella", "castling", "qt"])
def test_weights_stay_and_any_mechanism_works(case: Case, plan: str) -> None:
    if plan == "qt" and case.model == "Siglip2VisionModel":
        pytest.skip("padded patches have no one grid")
    original = case.build()
    model = copy.deepcopy(original)
    report = linvit.convert(model, permitting(plan))
    before, after = original.state_dict(), model.state_dict()
    assert {name for name in before if name not in after} == set(report.removed)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    result = case.out(model)
    assert result.isfinite().all() and not torch.allclose(result, case.out(original))
    result.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every
def test_attentions_are_the_implied_maps_or_an_error(case: Case) -> None:
    """Also where some layers are kept."""
    model = case.build()
    linvit.convert(model, replace(permitting("elu_linear"), rules=(Rule(None, layers=(0,)),)))
    xca = case.build()
    report = linvit.convert(xca, replace(permitting("xca"), rules=unequal(xca)))
    with torch.no_grad():
        if not case.attentions:
            with pytest.raises(LinvitError, match="no place for SAM 2's attentions"):
                case.run(model, output_attentions=True)
            return
        maps = case.run(model, output_attentions=True).attentions
        assert len(maps) == len(case.run(case.build(attn_implementation="eager"), output_attentions=True).attentions)
        for found in flat(maps) if "rotary" not in droppable(model) else ():  # its rows do not sum to one
            close(found.sum(-1), torch.ones_like(found.sum(-1)), 1e-3)
        if not all(layer.kept or layer.after == "softmax" for layer in report.layers):
            with pytest.raises(LinvitError, match="mixes channels"):
                case.run(xca, output_attentions=True)


def flat(maps: Any) -> list[Tensor]:
    return [maps] if isinstance(maps, Tensor) else [found for part in maps for found in flat(part)]


def unequal(model: nn.Module) -> tuple[Rule, ...]:
    """Layers with pooled queries or keys stay."""
    hosts = [module for _, module in find_hosts(model)]
    stay = tuple(
        i for i, m in enumerate(hosts) if {"pooling", "pooled queries"} & {a.feature for a in asks_of(model, m)}
    )
    return (Rule(None, layers=stay),) if stay else ()


@pytest.mark.parametrize("case", [case for case in CASES if case.prefix is not None], ids=str)
def test_grid_and_prefix_follow_the_picture(case: Case) -> None:
    model = case.build()
    linvit.convert(model, permitting("castling"))
    host = find_hosts(model)[0][1]
    with torch.no_grad():
        case.out(model)
        assert host.grids.grid == linvit.TokenGrid(4, 4, case.prefix)
        if case.other is not None:
            assert case.out(model, case.image(64, 40)).isfinite().all()
            assert host.grids.grid == linvit.TokenGrid(8, 5, case.prefix)


def test_shuffled_patches_are_seen_row_by_row() -> None:
    """MAE's encoder shuffles; a mechanism that knows places gives the same features however it does."""
    case = BY_NAME["ViTMAEModel"]
    model = case.build()
    linvit.convert(model, "inline")
    found = []
    for seed in (0, 1):
        noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            given = model(image(), noise=noise)
        patches = given.last_hidden_state[:, 1:]
        found.append(patches.gather(1, given.ids_restore[:, :, None].expand_as(patches)))
    close(*found)


def test_patches_of_one_size_have_a_grid() -> None:
    model = BY_NAME["Siglip2VisionModel"].build()
    linvit.convert(model, "qt", size=(24, 40))
    host, sizes = find_hosts(model)[0][1], torch.tensor([[3, 5], [3, 5]])
    given = {
        "pixel_values": torch.randn(2, 15, 192),
        "pixel_attention_mask": torch.ones(2, 15),
        "spatial_shapes": sizes,
    }
    with torch.no_grad():
        assert model(**given).last_hidden_state.isfinite().all() and host.grids.grid == linvit.TokenGrid(3, 5)
        with pytest.raises(LinvitError, match="looks at the token grid"):
            model(**{**given, "spatial_shapes": sizes - torch.tensor([[0], [1]])})


@every
def test_converting_again_copies_pickles_and_half_precision(case: Case) -> None:
    model, direct = case.build(), case.build()
    linvit.convert(model, "relu_quadratic")
    again = linvit.convert(model, permitting("stella"))
    linvit.convert(direct, permitting("stella"))
    assert {layer.before for layer in again.layers} == {"relu_quadratic"}
    with torch.no_grad():
        reference = case.out(model)
        torch.testing.assert_close(reference, case.out(direct))
        torch.testing.assert_close(case.out(pickle.loads(pickle.dumps(copy.deepcopy(model)))), reference)
        half = case.out(model.bfloat16(), case.image().bfloat16())
    assert torch.nn.functional.cosine_similarity(half.float().flatten(), reference.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("name", ["ViTModel", "DINOv3ViTModel", "SwinModel", "SamVisionModel", "SegformerModel"])
def test_compiles_as_one_graph_and_exports(name: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    linvit.convert(model, permitting("stella"))
    with torch.no_grad():
        reference = case.out(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(case.out(compiled), reference)
        exported = torch.export.export(model, (case.image(),)).module()
        torch.testing.assert_close(exported(case.image()).last_hidden_state, reference)


@every
def test_save_and_load(case: Case, tmp_path: Path) -> None:
    model = case.build()
    linvit.convert(model, replace(permitting("mixa", keep=1), name="mixa"))
    linvit.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"] == f"transformers:{case.model}"
    again = linvit.load(tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(case.out(again), case.out(model))


def test_only_the_vision_tower_of_siglip_is_converted() -> None:
    text = {**SMALL, "vocab_size": 20, "max_position_embeddings": 8, "projection_size": 24}
    del text["image_size"], text["patch_size"]
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=SMALL)).eval()
    report = linvit.convert(model, "stella")
    assert [layer.name for layer in report.layers] == [name for name, _ in find_hosts(model)]
    assert len(report.layers) == 2 and all("vision_model" in layer.name for layer in report.layers)
    with torch.no_grad():
        assert (
            model(pixel_values=image(), input_ids=torch.ones(1, 4, dtype=torch.long)).logits_per_image.isfinite().all()
        )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_kept_layers_keep_softmax_and_converted_ones_cannot_lose_their_mechanism(implementation: str) -> None:
    case = VIT
    rules = (Rule(Choice("stella"), layers=(0,)),)
    model, other = case.build(attn_implementation=implementation), case.build()
    linvit.convert(model, Plan("one", None, rules))
    linvit.convert(other, Plan("one", Choice("softmax"), rules))
    with torch.no_grad():
        reference = out(model, image())
        torch.testing.assert_close(reference, out(other, image()))
        model.set_attn_implementation("eager")
        torch.testing.assert_close(out(model, image()), reference)


def test_padded_tokens_are_left_out() -> None:
    mask = torch.ones(2, 17)
    mask[:, 12:] = 0
    for plan in ("softmax", "stella"):
        original = VIT.build()
        model = copy.deepcopy(original)
        linvit.convert(model, plan)
        with torch.no_grad():
            masked = model(image(), attention_mask=mask).last_hidden_state
            assert not torch.allclose(masked, out(model, image()))
            if plan == "softmax":
                torch.testing.assert_close(masked, original(image(), attention_mask=mask).last_hidden_state)


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "linvit.conversion.huggingface", None)
    with pytest.raises(LinvitError, match=r"too old .*: pip install linvit\[transformers\]"):
        linvit.convert(VIT.build(), "stella")


@pytest.mark.parametrize("model", ["LevitModel", "MobileViTModel", "YolosModel", "Data2VecVisionModel"])
def test_what_has_no_host_says_what_works_instead(model: str) -> None:
    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, model.replace("Model", "Config"))())
    with pytest.raises(LinvitError, match=f"{model} has attention that linvit does not know.*: use timm's ") as error:
        linvit.convert(built, "stella")
    assert timm.is_model(str(error.value).rpartition("timm's ")[2].partition(",")[0])


def test_every_model_named_instead_converts() -> None:
    for name in set(IN_TIMM.values()):
        with torch.device("meta"):
            assert find_hosts(timm.create_model(name)), name


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    sam = BY_NAME["SamVisionModel"].build()
    with pytest.raises(LinvitError, match=r"relative_bias .* drop=\('relative_bias',\)"):
        linvit.convert(sam, "stella")
    dropout = VIT.build(attention_probs_dropout_prob=0.1)
    with pytest.raises(LinvitError, match="attention_dropout"):
        linvit.convert(dropout, "stella")
    model = VIT.build()
    linvit.convert(model, "stella")
    linvit.save(model, tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_text()
    config = json.loads(whole)
    for key in ("_attn_implementation", "attn_implementation"):  # transformers would fetch and run what this names
        path.write_text(json.dumps({**config, "args": {**config["args"], key: "someone/kernels"}}))
        assert "someone" not in str(linvit.load(tmp_path).config)
    path.write_text(whole.replace("transformers:ViTModel", "transformers:ViTModl"))
    with pytest.raises(LinvitError, match="did you mean ViTModel"):
        linvit.load(tmp_path)
    path.write_text(whole.replace("transformers:ViTModel", "transformers:pipeline"))
    with pytest.raises(LinvitError, match="unknown model of transformers"):
        linvit.load(tmp_path)


def test_a_classifier_with_names_of_its_own_is_saved(tmp_path: Path) -> None:
    case = Case("ViTForImageClassification", "ViTConfig")
    model = case.build(num_labels=3, id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    linvit.convert(model, "stella", size=(SIDE, SIDE))
    linvit.save(model, tmp_path / "model")
    again = linvit.load(tmp_path / "model")
    images = torch.randn(1, 3, SIDE, SIDE)
    assert torch.equal(again(images).logits, model(images).logits) and again.config.id2label[1] == "b"
