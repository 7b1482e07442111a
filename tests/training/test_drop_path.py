"""Drop path by the recipe, on a model that exists."""

from __future__ import annotations

import pytest
import timm
from timm.layers import DropPath
from torch import nn

from linvit.training.drop_path import set_drop_path
from tests.training.toys import small_model


def rates(model: nn.Module) -> list[float]:
    return [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]


def test_rates_grow_as_in_timm() -> None:
    model, theirs = small_model(depth=5), small_model(depth=5, drop_path_rate=0.2)
    assert set_drop_path(model, 0.2)
    assert rates(model) == pytest.approx(rates(theirs))
    assert rates(model) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    set_drop_path(model, 0.2, skip=3)
    assert rates(model) == pytest.approx([0, 0, 0, 0.15, 0.2])
    set_drop_path(model, 0)
    assert not any(isinstance(module, DropPath) for module in model.modules())


def test_a_model_without_a_place_for_it() -> None:
    assert not set_drop_path(timm.create_model("efficientvit_b0"), 0.1)
