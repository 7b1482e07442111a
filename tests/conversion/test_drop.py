"""What a user drops is dropped in every converted layer, or it is an error; what a plan drops is a permission."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import timm
import torch

from linvit.attention import list_mechanisms
from linvit.conversion import Choice, Plan, Rule, as_plan, convert, droppable, find_hosts, list_plans
from linvit.conversion.convert import asks_of
from linvit.conversion.host import FEATURES
from linvit.errors import LinvitError, NotHonoured
from tests.conversion.families import FAMILIES, Family

every = pytest.mark.parametrize("family", FAMILIES, ids=str)
by_name = {family.model: family for family in FAMILIES}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def may_drop_all(name: str, model: torch.nn.Module) -> Plan:
    return replace(as_plan(name), drop=tuple(droppable(model)))


@every
@pytest.mark.parametrize("mechanism", ["native", "agent"])
def test_a_named_feature_is_dropped_even_where_it_could_be_honoured(family: Family, mechanism: str) -> None:
    """In every layer that has it and is converted; the model still runs, and is another than with the feature."""
    original = family.build()
    plan = may_drop_all(family.native if mechanism == "native" else mechanism, original)
    honoured = copy.deepcopy(original)
    before = convert(honoured, plan, size=family.sizes[0]) if droppable(original) else None
    for feature in sorted(droppable(original)):
        having = {n for n, m in find_hosts(original) for ask in asks_of(original, m) if ask.feature == feature}
        model = copy.deepcopy(original)
        assert before is not None
        if not FEATURES[feature].removable and not any(feature in layer.dropped for layer in before.layers):
            with pytest.raises(LinvitError, match=f"drop names {feature}, which .* honours and which cannot be taken"):
                convert(model, plan, drop=(feature,), size=family.sizes[0])
            continue
        report = convert(model, plan, drop=(feature,), size=family.sizes[0])
        assert {layer.name for layer in report.layers if feature in layer.dropped} == having
        assert not any(
            ask.removable for _, m in find_hosts(model) for ask in asks_of(model, m) if ask.feature == feature
        )
        same = [b.dropped == a.dropped for b, a in zip(before.layers, report.layers, strict=True)]
        with torch.no_grad():
            out, other = model(family.image()), honoured(family.image())
        assert out.isfinite().all() and (all(same) or not torch.equal(out, other))


@every
def test_a_feature_that_no_layer_has_is_one_line_and_nothing_is_touched(family: Family) -> None:
    model = family.build()
    types = [type(module) for module in model.modules()]
    for feature in FEATURES.keys() - droppable(model):
        with pytest.raises(LinvitError, match=f"drop names {feature}, which no layer of this") as error:
            convert(model, may_drop_all("stella", model), drop=(feature,))
        assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize("mechanism", list_mechanisms())
def test_pooling_goes_from_pvt_with_every_mechanism(mechanism: str) -> None:
    """Also from those that take fewer keys than queries: what is learned for a grid is laid out for the larger one."""
    model = by_name["pvt_v2_b0"].build()
    report = convert(model, mechanism, drop=("pooling",), size=64)
    assert sum("pooling" in layer.dropped for layer in report.layers) == 3
    assert report.removed_parameters > 0 and any(".sr." in name for name in report.removed)
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_a_plan_s_drop_is_a_permission_and_a_user_s_an_order() -> None:
    rules = (Rule(Choice("softmax"), layers=(0,)),)
    plan = Plan("mixed", Choice("stella"), rules, drop=("relative_bias", "shift_mask"))
    swin = by_name["swin_tiny_patch4_window7_224"]
    assert convert(swin.build(), plan).layers[0].dropped == ()
    assert convert(swin.build(), plan, drop=("shift_mask",)).layers[0].dropped == ("shift_mask",)


def test_what_was_dropped_stays_dropped_and_may_be_named_again() -> None:
    swin = by_name["swin_tiny_patch4_window7_224"]
    model, direct = swin.build(), swin.build()
    convert(model, "stella", drop=("relative_bias", "shift_mask"))
    convert(model, "softmax", drop=("relative_bias",))
    convert(direct, "softmax", drop=("relative_bias", "shift_mask"))
    with torch.no_grad():
        assert torch.equal(model(swin.image()), direct(swin.image()))


def test_mistakes_in_drop_are_told() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, attn_drop_rate=0.1)
    with pytest.raises(LinvitError, match="unknown feature to drop 'relativ_bias'; did you mean relative_bias"):
        convert(model, "stella", drop=("relativ_bias",))
    with pytest.raises(LinvitError, match="it has attention_dropout"):
        convert(model, "stella", drop=("pooling", "attention_dropout"))
    keep = Plan("keep", None, (Rule(None),))
    with pytest.raises(LinvitError, match="plan keep converts no layer that has it"):
        convert(model, keep, drop="attention_dropout")
    convert(model, "stella", drop="attention_dropout")
    convert(model, "softmax")


def test_removed_counts_numbers_and_tensors() -> None:
    model = by_name["swin_tiny_patch4_window7_224"].build()
    tables = [p for name, p in model.named_parameters() if name.endswith("relative_position_bias_table")]
    report = convert(model, "stella", drop=("relative_bias", "shift_mask"))
    assert report.removed_parameters == sum(p.numel() for p in tables) and len(report.removed) == len(tables)
    assert f"\nremoved {report.removed_parameters:,} parameters of dropped features, in 4 tensors\n" in str(report)


@pytest.mark.parametrize("plan", [name for name in list_plans() if name != "auto"])
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224", "vit_small_patch16_dinov3"])
def test_one_rule_for_what_is_given_up(name: str, plan: str) -> None:
    """What the plan's own list or the user names, and nothing else; the report says which of the two it was."""
    family = by_name[name]
    permitted, model, given = set(as_plan(plan).drop), family.build(), as_plan(plan, keep=1)
    try:
        report = convert(model, given, size=family.sizes[0])
    except NotHonoured as refused:
        assert not permitted & set(refused.features)
        report = convert(model, given, size=family.sizes[0], drop=refused.features)
        asked = next(line for line in report.losses if line.startswith("given up as asked: "))
        assert all(feature in asked for feature in refused.features)
    gone = {feature for layer in report.layers for feature in layer.dropped} - set(report.asked)
    assert gone <= permitted
    told = [line for line in str(report).splitlines() if line.startswith(f"plan {plan} gave up ")]
    assert len(told) == bool(gone) and all(feature in told[0] for feature in gone)
