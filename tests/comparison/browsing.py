"""A report's page opened in a real browser."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_BROWSER = [
    pytest.mark.skipif(
        not importlib.util.find_spec("playwright"), reason="the page's tests need playwright: pip install playwright"
    ),
    pytest.mark.skipif(
        not CHROMIUM, reason="the page's tests need a browser, and there is no chromium here: apt-get install chromium"
    ),
]


class Visit:
    """A page with what it complained of and asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1600, scheme: str = "light", **context: Any) -> None:
        viewport = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def rows(self) -> list[str]:
        return self.page.locator("#rows .opener").all_inner_texts()

    def column(self, name: str) -> list[str]:
        heads = self.page.locator("#rows th button").evaluate_all("heads => heads.map(head => head.dataset.sort)")
        return self.page.locator(f"#rows tbody tr:not(.more) td:nth-child({heads.index(name) + 1})").all_inner_texts()

    def points(self, chart: str) -> int:
        return self.page.locator(f"#{chart} .point").count()
