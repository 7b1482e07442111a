"""Plans that pay: what layers cost, what is chosen by it, and `auto`. Times are given, not taken, where they decide."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit import LinvitError
from linvit.clock import Timing
from linvit.conversion import convert, find_hosts, parse_plan
from linvit.conversion.planning import (
    LayerCost,
    LayerOption,
    LayerOptions,
    LayerTime,
    Setting,
    Study,
    front,
    layer_costs,
    timing,
)
from linvit.conversion.planning import study as measure
from tests.conversion.families import FAMILIES

CPU = torch.device("cpu")
VIT = {"embed_dim": 48, "depth": 4, "num_heads": 3, "img_size": 64, "num_classes": 5}


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**VIT, **options}).eval()


def swin() -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 64, "embed_dim": 24, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **options).eval()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Times as they are told: a layer's by the mechanism it has, a whole model's by its layers and 10 for the rest."""
    times = {"softmax": 4.0, "stella": 2.0, "relu_linear": 1.0, "linear_window": 4.2, "relu_quadratic": 5.0}

    def cost(module: nn.Module) -> float:
        mechanism = getattr(module, "mechanism", None)
        return times["softmax" if mechanism is None else mechanism.name]

    def layers(
        model: nn.Module, converted: nn.Module, setting: Setting, stayed: Collection[str]
    ) -> dict[str, LayerTime]:
        before, found = dict(find_hosts(model)), {}
        for name, module in find_hosts(converted):
            found[name] = LayerTime(cost(before[name]), None if name in stayed else cost(module))
        return found

    def models(
        model: nn.Module, converted: nn.Module, setting: Setting, saved: float | None = None
    ) -> tuple[float, float]:
        one, other = (10 + sum(cost(m) for _, m in find_hosts(each)) for each in (model, converted))
        return one, other

    monkeypatch.setattr(front, "time_layers", layers)
    monkeypatch.setattr(front, "time_models", models)
    yield times


def setting(**options: Any) -> Setting:
    return Setting((64, 64), CPU, **options)


def test_costs_by_hand() -> None:
    model = vit(dynamic_img_size=True)
    for cost in layer_costs(model, (64, 96)):
        assert cost.size is not None and cost.mechanism == "softmax" and cost.windows == 1
        assert (cost.size.queries, cost.size.heads, cost.size.head_dim) == (25, 3, 16)
        assert cost.macs == 2 * 3 * 25 * 25 * 16
    assert not any(hasattr(module, "mechanism") for module in model.modules()), "the model was touched"
    windows = [cost.windows for cost in layer_costs(swin(), (64, 64))]
    assert windows == [16, 16, 4]


def test_costs_of_a_converted_layer_are_its_own() -> None:
    model = vit()
    convert(model, "stella", keep=1)
    before, *after = layer_costs(model, (64, 64))
    assert before.mechanism == "softmax" and {cost.mechanism for cost in after} == {"stella"}
    assert all(cost.macs != before.macs for cost in after)


def test_costs_of_a_model_that_looks_at_its_data() -> None:
    """Gemma 4 asks where its padding is, which the meta device cannot tell."""
    family = next(family for family in FAMILIES if family.model.startswith("gemma4"))
    costs = layer_costs(family.build(), (family.size, family.width or family.size))
    assert costs and all(cost.size is not None and cost.macs > 0 for cost in costs)


@pytest.mark.parametrize("name", ["cait_xxs24_224", "efficientformerv2_s0"])
def test_costs_of_layers_whose_heads_talk(name: str) -> None:
    """Between its products a layer with talking heads asks no mechanism; two mixings of its heads are counted too."""
    family = next(family for family in FAMILIES if family.model == name)
    model, size = family.build(), (family.size, family.width or family.size)
    costs = [cost for cost in layer_costs(model, size) if cost.size is not None]
    assert len(costs) == len(find_hosts(model))
    first = costs[0].size
    assert first is not None and first.queries == first.keys
    products = first.heads * first.keys**2 * (first.head_dim + first.value_dim)
    assert costs[0].macs == products + 2 * first.heads**2 * first.keys**2
    drop = ("talking_heads", "relative_bias") if name.startswith("efficient") else ("talking_heads",)
    report = convert(model, "stella", size=size, drop=drop, costs=True)
    assert report.layers[0].macs is not None and report.layers[0].macs[0] == costs[0].macs


def test_costs_of_a_model_of_one_channel_that_does_not_say_so() -> None:
    model = timm.create_model("fastvit_sa12", in_chans=1)
    assert all(cost.macs > 0 for cost in layer_costs(model, (64, 64))) and find_hosts(model)


def test_a_size_that_the_model_cannot_take_is_one_line() -> None:
    with pytest.raises(LinvitError, match="cannot take images of 30×30") as caught:
        layer_costs(vit(), (30, 30))
    assert "\n" not in str(caught.value)
    with pytest.raises(LinvitError, match="cannot take images of 128×128"):
        convert(vit(), "qt", size=128)


def test_the_fastest_candidate_of_each_layer(clocks: dict[str, float]) -> None:
    found = measure(vit(), setting(), points=9)
    assert [point.converted for point in found.front] == [0, 1, 2, 3, 4]
    assert [point.speedup for point in found.front] == pytest.approx([26 / (26 - 3 * n) for n in range(5)])
    assert [point.predicted_ms for point in found.front] == pytest.approx([point.ms for point in found.front])
    best = found.choose()
    assert best.plan.choices(["a", "b", "c", "d"]) == [parse_plan("relu_linear").default] * 4
    assert found.choose(speedup=1.2).converted == 2 and found.choose(budget_ms=20).converted == 2
    kept = measure(vit(), setting(), keep=3, points=2)
    assert [point.converted for point in kept.front] == [0, 1] and kept.choose().converted == 1
    with pytest.raises(LinvitError, match=r"reaches 2× faster: the fastest is 1.86×, 14 ms of 26"):
        found.choose(speedup=2)
    with pytest.raises(LinvitError, match="cannot keep 5 layers: the model has 4"):
        measure(vit(), setting(), keep=5)


def test_a_tie_goes_to_what_converts_least(clocks: dict[str, float]) -> None:
    """One layer pays by a good tenth of itself and the others hardly: no clock tells such models apart."""
    layers = [LayerOptions(LayerCost(i, str(i), "softmax"), 1.0, ()) for i in range(3)]
    speeds = (1.0, 1.2, 1.209, 1.195)
    points = tuple(front.FrontPlan(parse_plan("stella"), i, 1.0, speedup=speed) for i, speed in enumerate(speeds))
    assert Study(setting(), 1.0, tuple(layers), points).choose().converted == 1
    assert Study(setting(), 1.0, tuple(layers), (points[0], replace(points[1], speedup=1.009))).choose().converted == 0
    assert Study(setting(), 1.0, tuple(layers), points).choose(speedup=1.205).converted == 2


@pytest.mark.parametrize(("turns", "longer"), [((10.0, 9.0), False), ((10.0, 10.1), True), ((10.0, 8.0), True)])
def test_what_layers_do_not_promise_is_measured_longer(
    turns: tuple[float, float], longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def by_turns(calls: Any, device: torch.device, *, budget: float, least: int) -> list[Timing]:
        asked.append(least)
        return [Timing(ms, ms, ms, least) for ms in (turns if len(asked) == 1 else (10.0, 9.1))]

    monkeypatch.setattr(timing.clock, "by_turns", by_turns)
    assert timing.time_models(vit(), vit(), setting(), 1.0) == ((10.0, 9.1) if longer else turns)
    assert asked == ([5, 15] if longer else [5])


def test_what_is_slower_stays(clocks: dict[str, float]) -> None:
    clocks.update(stella=4.5, relu_linear=3.95)  # one within the margin of a clock
    model = vit()
    report = convert(model, "auto")
    assert not any(hasattr(module, "mechanism") for module in model.modules())
    assert report.study is not None and report.study.choose().speedup == 1.0
    assert "no layer became linear" in str(report)


def test_a_converted_model_is_planned_anew(clocks: dict[str, float]) -> None:
    model = vit()
    convert(model, "stella", keep=[0])
    found = measure(model, setting())
    assert [layer.ms for layer in found.layers] == [4, 2, 2, 2]
    assert found.choose().plan.choices(["a", "b", "c", "d"]) == [parse_plan("relu_linear").default] * 4


def test_layers_by_what_they_buy_for_the_distance(clocks: dict[str, float]) -> None:
    """Every step of the front saves the most time for its distance; what is measured of whole plans is real."""
    model = vit()
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.attn.proj.weight.data *= (8.0, 0.01, 2.0, 0.5)[index]
    images = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    found = measure(model, setting(), candidates=("stella",), loader=[images[:4], images[4:]], images=6)
    turns = [layer.options[0].turn or 0 for layer in found.layers]
    assert found.images == 6 and min(turns) == turns[1] and max(turns) == turns[0]
    order = sorted(range(4), key=lambda index: turns[index])
    for count, point in enumerate(found.front):
        kept = [i for i, choice in enumerate(point.plan.choices("abcd")) if choice is not None]
        assert kept == sorted(order[:count])
        assert point.predicted_turn == pytest.approx(sum(turns[i] for i in kept))
    alone = found.front[1]
    assert alone.turn == pytest.approx(alone.predicted_turn, rel=1e-6)
    student = vit()
    student.load_state_dict(model.state_dict())
    convert(student, found.front[-1].plan)
    assert found.front[-1].turn == pytest.approx(1 - linvit.conversion.output_similarity(model, student, [images]))


def test_a_bias_is_kept_unless_dropped(clocks: dict[str, float]) -> None:
    model = swin()
    kept = measure(model, setting(), candidates=("stella",))
    assert len(kept.front) == 1 and all("relative_bias" in layer.options[0].refused for layer in kept.layers)
    why = (
        "stella cannot honour the relative_bias and shift_mask; --drop relative_bias,shift_mask gives up what it cannot"
    )
    assert kept.layers[0].options[0].refused == why
    half = measure(model, setting(), candidates=("stella",), drop=("relative_bias",))
    assert (
        half.layers[0]
        .options[0]
        .refused.endswith("the shift_mask; --drop relative_bias,shift_mask gives up what it cannot")
    )
    with pytest.raises(LinvitError, match="drop names rotary, which no layer of this SwinTransformer has"):
        measure(model, setting(), candidates=("stella",), drop=("rotary",))
    freed = measure(model, setting(), candidates=("stella",), drop=("relative_bias", "shift_mask"))
    plan = freed.choose().plan
    assert freed.choose().converted == 3 and set(plan.drop) == {"relative_bias", "shift_mask"}
    convert(model, plan)
    assert all(hasattr(module, "mechanism") for _, module in find_hosts(model))


def test_large_layers_that_stay_are_explained() -> None:
    size = layer_costs(vit(img_size=256), (256, 256))[0].size
    cost = LayerCost(3, "late", "softmax", size, 10)
    slow = LayerOptions(cost, 1.0, (LayerOption("stella", ratio=0.9), LayerOption("xca", refused="it cannot")))
    barred = LayerOptions(cost, 1.0, (LayerOption("stella", refused="it cannot"),))
    small = LayerOptions(layer_costs(vit(), (64, 64))[0], 1.0, (LayerOption("stella", ratio=0.9),))
    assert Study(setting(), 1.0, (slow, small)).missed() == ["layers 3: no candidate is faster (best 0.90×)"]
    near = LayerOptions(cost, 1.0, (LayerOption("stella", ratio=1.02),))
    assert Study(setting(), 1.0, (near,)).missed() == ["layers 3: no candidate is clearly faster (best 1.02×)"]
    assert Study(setting(), 1.0, (barred,)).missed() == ["layers 3: it cannot"]


def test_auto_is_saved_as_the_plan_it_became(clocks: dict[str, float], tmp_path: Path) -> None:
    model = vit()
    report = convert(model, "auto", keep=[1], candidates=["stella"])
    assert [layer.after for layer in report.layers] == ["stella", "softmax", "stella", "stella"]
    for layer in report.layers:
        assert layer.tokens == 17 and layer.macs is not None and layer.macs[0] == 2 * 3 * 17 * 17 * 16
    assert [layer.speedup for layer in report.layers] == [2.0, None, 2.0, 2.0]
    assert "measured 2.00×; 17 tokens" in str(report) and "cost more" not in str(report)
    linvit.save(model, tmp_path / "m")
    clocks.update(stella=99.0)  # a machine where it would not pay
    again = linvit.load(tmp_path / "m")
    assert [hasattr(module, "mechanism") for _, module in find_hosts(again)] == [True, False, True, True]
    picture = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(picture), model(picture))


@pytest.mark.parametrize("device", ["mps" if torch.cuda.is_available() else "cuda", "moon"])
def test_auto_on_a_device_that_is_absent(device: str) -> None:
    with pytest.raises(LinvitError, match=f"there is no device {device} here") as caught:
        convert(vit(), "auto", device=device)
    assert "\n" not in str(caught.value)


def test_auto_needs_a_model() -> None:
    with pytest.raises(LinvitError, match="linvit plan MODEL"):
        parse_plan("auto").choices(["a"])
    with pytest.raises(LinvitError, match="unknown plan"):
        parse_plan("auto:candidates=[stela]")
    chosen = parse_plan("auto:candidates=[stella,linear_window:window=4,linear=stella]")
    assert chosen.candidates == ("stella", "linear_window:window=4,linear=stella")  # type: ignore[attr-defined]
    with pytest.raises(LinvitError, match="different mechanisms"):
        measure(vit(), setting(), candidates=("mixa",))


def test_real_clocks_time_every_layer_in_its_place() -> None:
    """A pyramid: kept layers, alike layers and others; each timed with its own input."""
    model = swin()
    student = swin()
    convert(student, "stella", drop=("relative_bias", "shift_mask"), keep=[1])
    times = timing.time_layers(model, student, setting(budget=0.01), [find_hosts(model)[1][0]])
    assert [time.converted is not None for time in times.values()] == [True, False, True]
    assert all(time.original > 0 for time in times.values())
    one, other = timing.time_models(model, student, setting(budget=0.001, batch=2))
    assert one > 0 and other > 0
    again = timing.time_layers(student, student, setting(budget=0.01))  # hosts on both sides
    assert all(time.converted is not None for time in again.values())


def test_dense_models_are_timed_by_their_trunk() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "semantic_fpn", backbone="vit_tiny_patch16_224", backbone_args={**VIT, "patch_size": 16}, num_classes=3
    )
    found = measure(model, setting(budget=0.001), candidates=("stella",), points=2)
    assert [layer.cost.name.startswith("backbone.") for layer in found.layers] == [True] * 4
    assert all(layer.ms > 0 and layer.options[0].ms > 0 for layer in found.layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "unknown precision"),
        ({"mode": "fast"}, "unknown runtime"),
        ({"mode": "graph"}, "needs a CUDA device"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        setting(**options)


def test_measured_layers_of_any_plan() -> None:
    """`calibrate` places the layers that stay, for plans whose kept layers are the original's."""
    images = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    model = vit()
    model.blocks[2].attn.proj.weight.data *= 20.0  # type: ignore[index, union-attr, operator]
    report = convert(model, "relu_linear", keep=1, calibrate=[images])
    assert [layer.after for layer in report.layers].index("softmax") == 2
    assert report.sensitivity is not None and report.sensitivity.keep == (2,)


def test_a_plan_file_for_another_model_is_one_line(clocks: dict[str, float], tmp_path: Path) -> None:
    plan = measure(vit(depth=6), setting(), candidates=("stella",)).choose().plan
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    with pytest.raises(LinvitError, match="the plan names layer 4, but the model has layers 0–3"):
        convert(vit(), parse_plan(str(tmp_path / "plan.json")))
