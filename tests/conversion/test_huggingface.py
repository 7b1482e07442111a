"""Hugging Face's models, tiny and from their configs: nothing lost, softmax exact, any mechanism, saved and loaded."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.conversion import Choice, Plan, Rule, find_hosts
from tests.conversion.families import permitting

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "image_size": 32}
SIDE = 32


@dataclass(frozen=True)
class Case:
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    prefix: int = 0
    call: dict[str, Any] = field(default_factory=dict)  # for images of another size

    def __str__(self) -> str:
        return self.model

    def build(self, seed: int = 0, **more: Any) -> nn.Module:
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**SMALL, "patch_size": 8, **self.options, **more})
        model = getattr(transformers, self.model)(config)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.eval()


RESIZE = {"interpolate_pos_encoding": True}
CASES = [
    Case("ViTModel", "ViTConfig", prefix=1, call=RESIZE),
    Case("DeiTModel", "DeiTConfig", prefix=2, call=RESIZE),
    Case("Dinov2Model", "Dinov2Config", prefix=1),
    Case("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 4}, prefix=5),
    Case("SiglipVisionModel", "SiglipVisionConfig", call=RESIZE),
    Case("CLIPVisionModel", "CLIPVisionConfig", prefix=1, call=RESIZE),
    Case(
        "SamVisionModel",
        "SamVisionConfig",
        {"window_size": 3, "global_attn_indexes": [1], "output_channels": 8, "num_pos_feats": 4, "mlp_dim": 32},
    ),
]
every = pytest.mark.parametrize("case", CASES, ids=str)


def image(height: int = SIDE, width: int = SIDE) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def out(model: nn.Module, picture: Tensor, **call: Any) -> Tensor:
    return model(picture, **call).last_hidden_state


@every
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_softmax_changes_nothing(case: Case, implementation: str) -> None:
    original = case.build(attn_implementation=implementation).double()
    converted = copy.deepcopy(original)
    report = linvit.convert(converted, "softmax")
    assert len(report.layers) == 2 and report.new_parameters == 0 and not report.removed
    outputs = [out(model, image().double()) for model in (original, converted)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    after = dict(converted.named_parameters())
    grads = {name: p.grad for name, p in original.named_parameters() if p.grad is not None}
    noise = 1e-7 * max(float(grad.abs().max()) for grad in grads.values())  # eager softmax is computed in float32
    for name, grad in grads.items():
        torch.testing.assert_close(after[name].grad, grad, rtol=0, atol=1e-4 * float(grad.abs().max()) + noise)


@every
@pytest.mark.parametrize("plan", ["stella", "castling", "inline", "fastformer", "qt"])
def test_weights_stay_and_any_mechanism_works(case: Case, plan: str) -> None:
    original = case.build()
    model = copy.deepcopy(original)
    report = linvit.convert(model, permitting(plan))
    before, after = original.state_dict(), model.state_dict()
    assert {name for name in before if name not in after} == set(report.removed)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    result = out(model, image())
    assert result.isfinite().all() and not torch.allclose(result, out(original, image()))
    result.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("case", [case for case in CASES if not case.model.startswith("Sam")], ids=str)
def test_grid_and_prefix_follow_the_picture(case: Case) -> None:
    model = case.build()
    linvit.convert(model, "castling")
    host = find_hosts(model)[0][1]
    with torch.no_grad():
        out(model, image())
        assert host.grids.grid == linvit.TokenGrid(4, 4, case.prefix)
        assert out(model, image(64, 40), **case.call).isfinite().all()
    assert host.grids.grid == linvit.TokenGrid(8, 5, case.prefix)


@every
def test_converting_again_copies_pickles_and_half_precision(case: Case) -> None:
    model, direct = case.build(), case.build()
    linvit.convert(model, "relu_quadratic")
    again = linvit.convert(model, permitting("stella"))
    linvit.convert(direct, permitting("stella"))
    assert {layer.before for layer in again.layers} == {"relu_quadratic"}
    with torch.no_grad():
        reference = out(model, image())
        torch.testing.assert_close(reference, out(direct, image()))
        torch.testing.assert_close(out(pickle.loads(pickle.dumps(copy.deepcopy(model))), image()), reference)
        half = out(model.bfloat16(), image().bfloat16())
    assert torch.nn.functional.cosine_similarity(half.float().flatten(), reference.flatten(), dim=0) > 0.98


@every
def test_compiles_as_one_graph_and_exports(case: Case) -> None:
    model = case.build()
    linvit.convert(model, permitting("stella"))
    with torch.no_grad():
        reference = out(model, image())
        torch._dynamo.reset()
        torch.testing.assert_close(out(torch.compile(model, fullgraph=True, backend="eager"), image()), reference)
        exported = torch.export.export(model, (image(),)).module()
        torch.testing.assert_close(exported(image()).last_hidden_state, reference)


@every
def test_save_and_load(case: Case, tmp_path: Path) -> None:
    model = case.build()
    linvit.convert(model, "mixa", keep=1)
    linvit.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"] == f"transformers:{case.model}" and config["preprocessing"] == {"input_size": [3, 32, 32]}
    again = linvit.load(tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(out(again, image()), out(model, image()))


def test_only_the_vision_tower_of_siglip_is_converted() -> None:
    text = {**SMALL, "vocab_size": 20, "max_position_embeddings": 8, "projection_size": 24}
    del text["image_size"]
    model = transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config={**SMALL, "patch_size": 8})
    ).eval()
    report = linvit.convert(model, "stella")
    assert [layer.name for layer in report.layers] == [name for name, _ in find_hosts(model)]
    assert len(report.layers) == 2 and all("vision_model" in layer.name for layer in report.layers)
    with torch.no_grad():
        assert (
            model(pixel_values=image(), input_ids=torch.ones(1, 4, dtype=torch.long)).logits_per_image.isfinite().all()
        )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_kept_layers_keep_softmax_and_converted_ones_cannot_lose_their_mechanism(implementation: str) -> None:
    case = CASES[0]
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
        original = CASES[0].build()
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
        linvit.convert(CASES[0].build(), "stella")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    sam = CASES[-1].build()
    with pytest.raises(LinvitError, match=r"relative_bias .* drop=\('relative_bias',\)"):
        linvit.convert(sam, "stella")
    dropout = CASES[0].build(attention_probs_dropout_prob=0.1)
    with pytest.raises(LinvitError, match="attention_dropout"):
        linvit.convert(dropout, "stella")
    model = CASES[0].build()
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
