"""Schedules, weight decay and clipping against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from linvit.training.config import Config, Stage
from linvit.training.optimiser import clip, make_optimiser, select_trainable
from linvit.training.recipes import recipe
from linvit.training.schedule import Schedule, stage_schedule
from tests.training.toys import small_model


def test_cosine_beneath_the_warm_up() -> None:
    """timm's way: the cosine runs from the first step on."""
    rate = Schedule(peak=1.0, steps=100, warmup=10, start=0.1, lowest=0.01)
    assert rate(0) == 0.1 and rate(5) == pytest.approx(0.55)
    assert rate(10) == pytest.approx(0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 0.1)))
    assert rate(50) == pytest.approx(0.505) and rate(100) == rate(200) == 0.01


def test_cosine_after_the_warm_up() -> None:
    rate = Schedule(peak=1.0, steps=110, warmup=10, prefix=True)
    assert rate(10) == 1.0 and rate(60) == pytest.approx(0.5) and rate(110) == 0
    assert Schedule(peak=1.0, steps=10, cosine=False)(9) == 1.0


def test_schedules_of_recipes() -> None:
    fair = recipe("fair")
    rate = stage_schedule(fair, fair.plan_of_stages()[0], 3100, 10)
    assert rate(0) == 5e-7 and rate(1500) == pytest.approx((5e-4 + 5e-6) / 2) and rate(3050) == 5e-6
    qt = recipe("qtvit", "qtvit_1")
    rate = stage_schedule(qt, qt.plan_of_stages()[0], 3200, 10)
    assert rate(0) == 0 and rate(200) == pytest.approx(2e-3) and rate(1700) == pytest.approx(1e-3)
    fast = recipe("fast")
    assert stage_schedule(fast, Stage("x", lr=1e-2), 100, 10)(5) == pytest.approx(1e-2, rel=0.01)


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
    assert not any("norm" in name or "bias" in name for name in released)
    assert len(decaying(Config(no_decay="nothing"))) == len(select_trainable(small_model("qt"), "all"))


def test_agc_against_its_formula() -> None:
    """A unit's gradient is at most `factor` times its weights in L2 norm, of 1e-3 at least; not so the head's."""
    model = small_model()
    named = select_trainable(model, "all")
    torch.manual_seed(1)
    for p in named.values():
        p.grad = torch.randn_like(p)
    before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    clip(Config(clip_agc=0.01), named, torch.tensor(1.0), "head")
    for name, p in named.items():
        expected = before[name].clone()
        if not name.startswith("head."):
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
    clip(Config(clip_norm=2.0), named, torch.tensor(norm), None)
    assert torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item() == pytest.approx(2, rel=1e-4)
