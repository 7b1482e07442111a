"""Stores with known contents, which the report's tests share."""

from __future__ import annotations

import pytest

from linvit.comparison.reporting import Contents, gather
from tests.comparison.synthetic import MECHANISMS, write_store


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return gather([write_store(tmp_path_factory.mktemp("a"))])


@pytest.fixture(scope="module")
def distil(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    without = [name for name in MECHANISMS if name != "softmax"]
    return gather([write_store(tmp_path_factory.mktemp("b"), mode="distil", mechanisms=without)])
