"""Plans: who gets what, and one clear line for every mistake, with the model left as it was."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from linvit import LinvitError
from linvit.conversion import Choice, Plan, Rule, as_plan, convert
from tests.conversion.families import VIT


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("deit_tiny_patch16_224", num_classes=7, **{**VIT, "depth": 4})


def mechanisms(model: nn.Module) -> list[str]:
    return [block.attn.mechanism.name if hasattr(block.attn, "mechanism") else "kept" for block in model.blocks]


def test_mixa_keeps_the_named_or_the_first_layers_quadratic(model: nn.Module) -> None:
    convert(model, "mixa", keep=(1, 3))
    assert mechanisms(model) == ["stella", "relu_quadratic", "stella", "relu_quadratic"]
    convert(model, "mixa", keep=1)
    assert mechanisms(model) == ["relu_quadratic", "stella", "stella", "stella"]
    convert(model, "mixa", keep=0)
    assert mechanisms(model) == ["stella"] * 4


def test_places_for_the_quadratic_layers(model: nn.Module) -> None:
    def kept(**options: object) -> list[int]:
        convert(model, "mixa", **options)
        return [i for i, name in enumerate(mechanisms(model)) if name == "relu_quadratic"]

    assert kept(keep=2) == [0, 1]
    assert kept(keep=3, where="last") == [1, 2, 3]
    assert kept(keep=2, where="alternating") == [0, 2]
    assert kept(keep=4, where="alternating") == [0, 1, 2, 3]


def test_rules_by_index_and_name_first_match_wins(model: nn.Module) -> None:
    rules = (Rule(None, layers=(0,)), Rule(Choice("softmax"), pattern=r"blocks\.[01]\."))
    report = convert(model, Plan("mine", Choice("stella"), rules))
    assert mechanisms(model) == ["kept", "softmax", "stella", "stella"]
    assert [layer.after for layer in report.layers] == ["softmax", "softmax", "stella", "stella"]
    assert "2 of 4 layers changed" in str(report)


def test_options_reach_the_mechanism_and_parameters_follow_the_model(model: nn.Module) -> None:
    model.double().eval()
    report = convert(model, "castling", kernel_size=5)
    conv = [p for n, p in model.named_parameters() if ".mechanism." in n]
    assert len(conv) == 4 and conv[0].shape == (3, 1, 5, 1) and conv[0].dtype == torch.float64
    assert report.new_parameters == 4 * 3 * 5
    assert not model.blocks[0].attn.mechanism.training


def test_learned_positions_are_laid_out_for_the_input_size(model: nn.Module) -> None:
    convert(model, "qt", size=(96, 64))
    assert model.blocks[0].attn.mechanism.position.table.shape[-2:] == (6, 4)
    model = timm.create_model("efficientvit_b1", num_classes=7)
    convert(model, "qt")
    tables = [p.shape[-1] for n, p in model.named_parameters() if n.endswith("position.table")]
    assert tables == [14, 14, 14, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "plan, options, message",
    [
        ("stela", {}, "did you mean stella"),
        ("stella", {"epsilon": 1}, "unknown option of stella"),
        ("relu_linear", {"epz": 1}, "did you mean eps"),
        ("mixa", {"keep": 7}, "cannot keep 7 layers: the model has 4"),
        ("mixa", {"keep": (0, 4)}, "names layer 4, but the model has layers 0–3"),
        ("mixa", {"where": "frst"}, "did you mean first"),
        ("mixa", {"kept": 7}, "unknown option of plan mixa 'kept'; did you mean keep"),
        ("xca", {"lpi": True}, "between attention and MLP"),
        (Plan("mine", Choice("stella"), (Rule(None, pattern="stage"),)), {}, "matches no layer"),
        (Plan("mine", Choice("stella")), {"local": 3}, "finished plan"),
        (
            Plan("mine", None, (Rule(Choice("stella"), layers=(0, 1)), Rule(None, layers=(1,)))),
            {},
            "rules of plan mine conflict: layer 1 is to be stella and as it is",
        ),
    ],
)
def test_mistakes_are_one_line_and_touch_nothing(
    model: nn.Module, plan: str | Plan, options: dict, message: str
) -> None:
    state = list(model.state_dict())
    with pytest.raises(LinvitError, match=message) as error:
        convert(model, plan, **options)
    assert "\n" not in str(error.value)
    assert mechanisms(model) == ["kept"] * 4 and list(model.state_dict()) == state


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(LinvitError, match="no attention that linvit can swap"):
        convert(timm.create_model("resnet18"), "stella")


def test_every_mechanism_name_is_a_plan() -> None:
    assert as_plan("sima").default == Choice("sima")
