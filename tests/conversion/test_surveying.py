"""The survey: rows that prove themselves, reasons for what is refused, and enough families."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import timm
import torch
from torch import nn

from linvit.conversion.hosts import HOSTS
from linvit.conversion.surveying import attention_modules, examine, families, finite, smallest, survey


@pytest.mark.parametrize(
    "family, status, reason",
    [
        ("vision_transformer", "converted", ""),
        ("swin_transformer", "converted", "gives up relative_bias, shift_mask"),
        ("davit", "partly", "ChannelAttention"),
        ("swiftformer", "refused", "EfficientAdditiveAttention"),
    ],
)
def test_rows(family: str, status: str, reason: str) -> None:
    rows = list(survey([family]))
    assert [(row.family, row.status) for row in rows] == [(family, status)]
    assert reason in rows[0].reason
    assert set(json.loads(json.dumps(asdict(rows[0])))) == {"family", "example", "status", "reason"}


def test_families_without_attention_are_left_out() -> None:
    assert smallest("resnet") is None and list(survey(["resnet"])) == []
    assert "resnet" in families() and "named" not in families()


def test_attention_hidden_in_few_models_of_a_family_is_found() -> None:
    example = smallest("mobilenetv3")
    assert example is not None and "hybrid" in example


def test_at_least_thirty_modules_have_hosts() -> None:
    """Without running them all: the modules that define a hosted class, or build on timm's shared attention."""
    own = {host.original.__module__.removeprefix("timm.models.") for host in HOSTS}
    shared = {"vision_transformer", "deit", "pit", "naflexvit", "eva", "mobilevit", "csatv2"}
    assert len({name for name in own if name in families()} | shared) >= 30


def test_a_model_that_breaks_is_a_row_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> nn.Module:
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr(timm, "create_model", broken)
    row = examine("vision_transformer", "test_vit")
    assert row.status == "refused" and row.reason == "RuntimeError: no such luck"


def test_finite_sees_what_is_not() -> None:
    model = timm.create_model("test_vit")
    assert finite(model, 1, (160, 160))
    next(m for m in attention_modules(model)).proj.weight.data.fill_(float("nan"))
    assert not finite(model, 1, (160, 160))
    assert torch.isfinite(model.head.weight).all()
