"""The documents are true: pages are current, links lead somewhere, examples run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import timm

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_mechanism_pages_are_current() -> None:
    docs = runpy.run_path(str(ROOT / "scripts" / "docs.py"))
    rendered = docs["pages"]()
    written = {path.name: path.read_text(encoding="utf-8") for path in docs["FOLDER"].glob("*.md")}
    stale = [name for name in {*rendered, *written} if rendered.get(name) != written.get(name)]
    assert not stale, f"run `make docs`: {', '.join(sorted(stale))}"


def test_the_table_of_hosts_is_current() -> None:
    docs = runpy.run_path(str(ROOT / "scripts" / "docs.py"))
    assert docs["conversion"]() == docs["GUIDE"].read_text(encoding="utf-8"), "run `make docs`"


@named
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{target} is not there"


@named
def test_commands_exist(document: Path) -> None:
    """Every `linvit verb` a document shows is a verb, and every `make target` a target."""
    from tests.cli.test_cli import commands

    verbs = {name.split()[0] for name, _ in commands()}
    text = document.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^    |`)linvit ([a-z]+)", text, re.MULTILINE)) <= verbs
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize(
    "document",
    [
        ROOT / "README.md",
        *(ROOT / "docs" / name for name in ("index.md", "conversion.md", "training.md", "comparison.md")),
    ],
    ids=lambda path: path.name,
)
def test_examples_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of a document's Python in order, as a reader would type it, with random weights for pretrained ones."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: create(*args, **{**kwargs, "pretrained": False}))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), document.name, "exec"), {})
