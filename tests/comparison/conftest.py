"""Stores with known contents and a browser, which the report's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from linvit.comparison.reporting import Contents, gather
from tests.comparison.browsing import CHROMIUM
from tests.comparison.synthetic import MECHANISMS, write_store


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return gather([write_store(tmp_path_factory.mktemp("a"))])


@pytest.fixture(scope="module")
def distil(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    without = [name for name in MECHANISMS if name != "softmax"]
    return gather([write_store(tmp_path_factory.mktemp("b"), mode="distil", mechanisms=without)])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
