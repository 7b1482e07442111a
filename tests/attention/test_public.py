"""What a mechanism in somebody else's package can count on."""

from __future__ import annotations

import logging

import pytest
import torch

from linvit import attention
from linvit.attention import TokenGrid, create_attention
from linvit.attention.mechanism import log_reference

CLASSES = {
    *("Call", "Capabilities", "Mechanism", "Shape", "Size", "TokenGrid", "LinearAttention", "Fusion", "Formula"),
    *("Feature", "Direction", "EluPlusOne", "ReLU", "Sigmoid", "Normaliser", "Constant", "RowSum", "Unnormalised"),
    *("GridConv", "NormShortcut", "Rotary", "TokenConv", "Range"),
}
TYPES = {"ConvWidth", "Count", "Eps", "Number"}  # of options
FUNCTIONS = {
    *("create_attention", "list_mechanisms", "mechanism_class", "options_of", "register", "check_options"),
    *("begin_at_zero", "lift", "regroup", "values_at_queries"),
}


def test_the_public_names() -> None:
    assert set(attention.__all__) == CLASSES | FUNCTIONS | TYPES
    assert [name for name in CLASSES | FUNCTIONS if not getattr(attention, name).__doc__] == []


@pytest.mark.parametrize(
    "name, options, why",
    [
        ("stella", {}, "the tensors are on cpu, not on an NVIDIA GPU"),
        ("hydra", {}, "the tensors are on cpu"),
        ("mobile", {"small_head_dim": 8}, "the tensors are on cpu"),
        ("mobile", {}, None),
        ("agent", {"heads": 2, "head_dim": 8, "grid": TokenGrid(8, 8)}, "it has no Triton kernel"),
        ("xca", {"heads": 2}, "the tensors are on cpu"),
        ("stella", {"heads": 2, "head_dim": 8, "local": 3}, "the tensors are on cpu"),
        ("softmax", {}, None),
        ("relu_quadratic", {}, None),
    ],
)
def test_says_why_it_takes_the_reference(name: str, options: dict, why: str | None) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind(0)
    found = create_attention(name, **options).why_reference(q, k, v, TokenGrid(8, 8))
    assert found is None if why is None else why in (found or "")


def test_logs_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    log_reference.cache_clear()
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind(0)
    with caplog.at_level(logging.DEBUG, logger="linvit"):
        for _ in range(3):
            create_attention("stella")(q, k, v)
        create_attention("stella", impl="reference")(q, k, v)
    assert [record.getMessage() for record in caplog.records] == [
        "stella takes the reference: the tensors are on cpu, not on an NVIDIA GPU"
    ]
