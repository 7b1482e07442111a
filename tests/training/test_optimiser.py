"""Schedules, weight decay and clipping against their formulas."""

from __future__ import annotations

import math

import pytest
import timm
import torch

import linvit
from linvit.conversion.saving import note
from linvit.errors import LinvitError
from linvit.training.config import Config, Stage, override
from linvit.training.optimisation import (
    Muon,
    Schedule,
    check_trainable,
    clip,
    make_optimiser,
    matrices_in,
    select_trainable,
    stage_schedule,
)
from linvit.training.recipes import recipe
from tests.training.toys import engine, small_model


def test_cosine_beneath_the_warm_up() -> None:
    """timm's way: the cosine runs from the first step on."""
    rate = Schedule(peak=1.0, steps=100, warmup=10, start=0.1, lowest=0.01)
    assert rate(0) == 0.1 and rate(5) == pytest.approx(0.55)
    assert rate(10) == pytest.approx(0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 0.1)))
    assert rate(50) == pytest.approx(0.505) and rate(100) == rate(200) == 0.01


def test_cosine_after_the_warm_up() -> None:
    rate = Schedule(peak=1.0, steps=110, warmup=10, prefix=True)
    assert rate(10) == 1.0 and rate(60) == pytest.approx(0.5) and rate(110) == 0
    assert Schedule(peak=1.0, steps=10, kind="constant")(9) == 1.0


def test_schedules_of_recipes() -> None:
    fair = recipe("fair")
    rate = stage_schedule(fair, fair.plan_of_stages()[0], 3100, 10)
    assert rate(0) == 5e-7 and rate(1500) == pytest.approx((5e-4 + 5e-6) / 2) and rate(3050) == 5e-6
    qt = recipe("qtvit", "qtvit_1")
    rate = stage_schedule(qt, qt.plan_of_stages()[0], 3200, 10)
    assert rate(0) == 0 and rate(200) == pytest.approx(2e-3) and rate(1700) == pytest.approx(1e-3)
    fast = recipe("fast")
    assert stage_schedule(fast, Stage("x", lr=1e-2), 100, 10)(5) == pytest.approx(1e-2, rel=0.01)
    short = stage_schedule(fast, Stage("x", lr=1e-2), 20, 100)  # whose warm-up would be 50 steps
    assert short(4) == pytest.approx(9e-3, rel=0.01) and short(3) < short(4) > short(5)


def gradients_for(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def test_muon_is_torchs_muon() -> None:
    """One matrix after the other there, all of a shape at once here; for a packed qkv, each of its three parts."""
    torch.manual_seed(0)
    shapes = [(24, 16), (24, 16), (16, 40)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in given] for given in [[torch.randn(s) for s in shapes]] * 2)
    packed = torch.nn.Parameter(torch.randn(48, 16))
    begun, held = [p.detach().clone() for p in ours], packed.detach().clone()
    alone = [torch.nn.Parameter(part.clone()) for part in packed.detach().split(16)]
    group = {"params": [*ours, packed], "parts": [1, 1, 1, matrices_in("attn.qkv.weight", packed)], "weight_decay": 0.1}
    made = Muon([group], lr=1e-2, fused=True)
    given = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon([*theirs, *alone], **given)
    for _ in range(4):
        gradients_for([*ours, packed])
        for a, b in zip(theirs, ours, strict=True):
            a.grad = b.grad.clone()
        for a, b in zip(alone, packed.grad.split(16), strict=True):
            a.grad = b.clone()
        made.step()
        reference.step()
    for a, b, start in zip([*ours, packed], [*theirs, torch.cat(list(alone))], [*begun, held], strict=True):
        assert (a - b).norm() < 0.03 * (b - start).norm()  # directions are found in bfloat16


def test_muon_leaves_out_a_bad_step() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    made = Muon([{"params": [matrix], "parts": [1]}, {"params": [vector]}], lr=1e-2, fused=True)
    made.grad_scale, made.found_inf = None, torch.zeros(())
    gradients_for([matrix, vector])
    made.step()
    before = [matrix.clone(), vector.clone(), made.state[matrix]["momentum"].clone()]
    matrix.grad[0, 0] = torch.nan
    made.found_inf.fill_(1)
    made.step()
    assert all(map(torch.equal, before, [matrix, vector, made.state[matrix]["momentum"]]))
    made.found_inf.fill_(0)
    gradients_for([matrix, vector])
    made.step()
    assert not torch.equal(before[0], matrix) and not torch.equal(before[1], vector)


def test_muon_moves_the_inner_matrices() -> None:
    model = small_model("stella")
    named = select_trainable(model, "all")
    made = make_optimiser(Config(optimiser="muon"), model, named)
    inner = {id(p) for group in made.param_groups if "parts" in group for p in group["params"]}
    chosen = {name for name, p in named.items() if id(p) in inner}
    assert {name.split(".", 2)[2] for name in chosen} == {
        f"{n}.weight" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert {parts for group in made.param_groups for parts in group.get("parts", [])} == {1, 3}


@pytest.mark.parametrize("which, names", [("attention", {"qkv", "proj"}), ("fc2", {"fc2"}), ("mechanism", set())])
def test_muon_moves_only_what_it_is_told(which: str, names: set[str]) -> None:
    model = small_model("stella")
    named = select_trainable(model, "all")
    made = make_optimiser(Config(optimiser="muon", muon=which), model, named)
    inner = {id(p) for group in made.param_groups if "parts" in group for p in group["params"]}
    assert {name.split(".")[-2] for name, p in named.items() if id(p) in inner} == names
    assert sum(len(group["params"]) for group in made.param_groups) == len(named)


@pytest.mark.parametrize("optimiser", ["muon", "adamw", "sgd"])
def test_rates_of_matrices_and_of_what_conversion_added(optimiser: str) -> None:
    """By the rates at which a step was taken."""
    model = small_model("qt")
    settings = {"muon_lr": 4, "added_lr": 3, "lr": 1e-3, "warmup_epochs": 0, "schedule": "constant", "epochs": 0.25}
    made = engine(model, optimiser=optimiser, **settings)
    made.run()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in made.stepper.optimiser.param_groups for p in group["params"]}
    assert len(rates) == len(names) and rates["head.weight"] == rates["blocks.0.norm1.bias"] == 1e-3
    assert rates["blocks.0.mlp.fc1.weight"] == (4e-3 if optimiser == "muon" else 1e-3)
    added = [rate for name, rate in rates.items() if ".mechanism." in name]
    assert added and added == [pytest.approx(3e-3)] * len(added)


def decaying(config: Config) -> set[str]:
    model = small_model("qt")
    named = select_trainable(model, "all")
    groups = make_optimiser(config, model, named).param_groups
    assert sum(len(group["params"]) for group in groups) == len(named)
    ids = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    return {name for name, p in named.items() if id(p) in ids}


def test_what_decays() -> None:
    vectors = decaying(Config(no_decay="vectors"))
    assert "blocks.0.attn.qkv.weight" in vectors and "pos_embed" not in vectors and "cls_token" not in vectors
    assert not any(name.endswith("bias") or "norm" in name for name in vectors)
    released = decaying(recipe("qtvit"))  # by name: positions decay, norms and biases do not
    assert "pos_embed" in released and "blocks.0.norm1.weight" not in released
    assert not any("bias" in name or ("norm" in name and "shortcut" not in name) for name in released)
    assert len(decaying(Config(no_decay="nothing"))) == len(select_trainable(small_model("qt"), "all"))


def test_agc_against_its_formula() -> None:
    """A unit's gradient is at most `factor` times its weights in L2 norm, of 1e-3 at least."""
    model = small_model()
    named = select_trainable(model, "all")
    torch.manual_seed(1)
    for p in named.values():
        p.grad = torch.randn_like(p)
    before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    clip(Config(clip_agc=0.01), named, torch.tensor(1.0))
    for name, p in named.items():
        expected = before[name].clone()
        units = expected.flatten(1) if p.ndim > 1 else expected.reshape(1, -1)
        weights = p.detach().flatten(1) if p.ndim > 1 else p.detach().reshape(1, -1)
        for unit, weight in zip(units, weights, strict=True):
            limit = 0.01 * max(weight.norm().item(), 1e-3)
            if unit.norm() > limit:
                unit.mul_(limit / unit.norm())
        assert p.grad is not None and torch.allclose(p.grad, expected, rtol=1e-4, atol=1e-7), name


def test_norm_is_clipped() -> None:
    named = select_trainable(small_model(), "all")
    for p in named.values():
        p.grad = torch.ones_like(p)
    norm = math.sqrt(sum(p.numel() for p in named.values()))
    clip(Config(clip_norm=2.0), named, torch.tensor(norm))
    assert torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item() == pytest.approx(2, rel=1e-4)


def test_gradients_are_clipped_number_by_number() -> None:
    model = small_model()
    named = select_trainable(model, "all")
    for p in named.values():
        p.grad = 3 * torch.randn_like(p)
    before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    clip(Config(clip_value=2.0), named, torch.tensor(1.0))
    assert all(torch.equal(p.grad, before[name].clamp(-2, 2)) for name, p in named.items() if p.grad is not None)
    with pytest.raises(LinvitError, match="clip by one of"):
        Config(clip_value=2.0, clip_norm=1.0)


def test_muon_leaves_both_classifiers_of_a_distilled_model_alone() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, embed_dim=24, num_heads=2, num_classes=5)
    made = make_optimiser(Config(optimiser="muon"), model, select_trainable(model, "all"))
    moved = {id(p) for group in made.param_groups if "parts" in group for p in group["params"]}
    assert id(model.blocks[0].attn.qkv.weight) in moved
    assert not moved & {id(model.head.weight), id(model.head_dist.weight)}


def test_what_decays_in_qtvit_is_what_decays_in_its_code() -> None:
    """There the head's LayerNorm is called norm, and the shortcut's BatchNorm is not."""
    model = timm.create_model("qtvit_1", num_classes=5)
    made = make_optimiser(recipe("qtvit"), model, select_trainable(model, "all"))
    decaying = {id(p) for group in made.param_groups if group["weight_decay"] for p in group["params"]}
    named = dict(model.named_parameters())
    host = "stages.2.blocks.1.context_module.main"
    for name in (f"{host}.mechanism.shortcut.norm.weight", f"{host}.mechanism.scale", "head.classifier.0.weight"):
        assert id(named[name]) in decaying, name
    for name in ("head.classifier.1.weight", f"{host}.proj.norm.weight", f"{host}.mechanism.shortcut.norm.bias"):
        assert id(named[name]) not in decaying, name


def test_short_trainings_warm_up_for_half_of_their_steps() -> None:
    config = override(recipe("mixa"), ["epochs=10"])  # ten epochs of warm-up, of 150
    rate = stage_schedule(config, config.plan_of_stages()[0], 1000, 100)
    assert rate.warmup == 500 and rate(999) < 0.11 * config.scaled(config.lr)


def test_the_cool_down_of_a_constant_rate() -> None:
    config = Config(schedule="constant", epochs=8, cooldown_epochs=2, warmup_epochs=0)
    rate = stage_schedule(config, config.plan_of_stages()[0], 1000, 100)
    assert rate(799) == config.lr and rate(800) == config.min_lr
    with pytest.raises(LinvitError, match="cooldown_epochs is for a training in one stage"):
        override(recipe("fast"), ["cooldown_epochs=2"])


def test_muon_with_nothing_to_move() -> None:
    model = small_model()
    made = make_optimiser(Config(optimiser="muon"), model, select_trainable(model, "all"))
    model.head(torch.randn(2, 16)).sum().backward()
    before = model.blocks[0].attn.qkv.weight.clone()
    made.step()
    assert torch.equal(model.blocks[0].attn.qkv.weight, before)


def test_what_hugging_face_calls_tables_and_classifier() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = transformers.ViTForImageClassification(config)
    note(model, label_names=("a", "b"), crop_pct=0.9)  # as every training does
    made = make_optimiser(Config(optimiser="muon"), model, select_trainable(model, "all"))
    named = dict(model.named_parameters())
    moved = {id(p) for group in made.param_groups if "parts" in group for p in group["params"]}
    decaying = {id(p) for group in made.param_groups if group["weight_decay"] for p in group["params"]}
    assert id(named["classifier.weight"]) not in moved and moved
    assert id(named["vit.embeddings.position_embeddings"]) not in decaying
    assert id(named["vit.embeddings.cls_token"]) not in decaying


def test_muon_leaves_tables_alone() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=16, num_heads=(1, 1, 2, 2))
    made = make_optimiser(Config(optimiser="muon"), model, select_trainable(model, "all"))
    moved = {id(p) for group in made.param_groups if "parts" in group for p in group["params"]}
    attention = model.layers[0].blocks[0].attn
    assert id(attention.qkv.weight) in moved and id(attention.relative_position_bias_table) not in moved
    model = small_model()
    linvit.convert(model, "window", size=(8, 8), window=2, bias=True)
    made = make_optimiser(Config(optimiser="muon"), model, select_trainable(model, "all"))
    table = id(model.blocks[0].attn.mechanism.table)
    (group,) = [group for group in made.param_groups if table in {id(p) for p in group["params"]}]
    assert "parts" not in group and not group["weight_decay"]


@pytest.mark.parametrize("which", ["attention", "nothing_here", "bias"])
def test_muon_without_a_matrix_is_a_mistake(which: str) -> None:
    with pytest.raises(LinvitError, match=f"muon={which}: no matrix of the model is called so"):
        check_trainable(small_model(), Config(optimiser="muon", muon=which))
    check_trainable(small_model(), Config(muon=which))
    check_trainable(small_model("stella"), Config(optimiser="muon", muon="attention"))
