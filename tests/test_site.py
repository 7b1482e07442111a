"""The site: the API reference is complete, everything builds strictly, and a page opened as a file has a search."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import site

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INTERNAL = {"cli", "kernels", "page"}  # rooms that users reach by commands, or through mechanisms
ROOMS = sorted(path.parent.name for path in (ROOT / "src" / "linvit").glob("*/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in INTERNAL])
def test_every_room_has_a_page(room: str) -> None:
    page = ROOT / "docs" / "api" / f"{room}.md"
    assert f"::: linvit.{room}\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["linvit", *(f"linvit.{room}" for room in ROOMS)])
def test_the_reference_has_what_a_module_exports(module: str) -> None:
    """Found in the sources, as the site finds it: the same names, and each of them where it is defined."""
    names = site.exports(module)
    assert set(names) == set(getattr(importlib.import_module(module), "__all__", ()))
    for name in names:
        home, _, found = site.definition(module, name).rpartition(".")
        defined = vars(importlib.import_module(home))
        assert defined[found] is getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site is built by mkdocs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds(built: Path) -> None:
    convert = (built / "api" / "conversion.html").read_text(encoding="utf-8")
    assert 'id="linvit.conversion.plan.Plan"' in convert
    assert all((built / "mechanisms" / f"{name}.html").exists() for name in ("stella", "softmax", "index"))
    assert "A new mechanism" in (built / "contributing.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here: apt-get install chromium")
def test_a_page_opened_as_a_file_searches_and_asks_the_network_for_nothing(built: Path) -> None:
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((built / "mechanisms" / "stella.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("castling", delay=20)
        page.wait_for_selector(".md-search-result__item")
        links = page.eval_on_selector_all(".md-search-result__link", "all => all.map(link => link.href)")
        browser.close()
    assert any("mechanisms/castling.html" in link for link in links)
    assert asked and all(url.startswith(("file:", "about:", "data:")) for url in asked)
