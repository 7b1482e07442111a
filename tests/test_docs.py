"""The documents are true: pages are current, links lead somewhere, examples run, numbers are what was measured."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import timm

from linvit.version import __version__

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
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
def test_files_it_names_are_there(document: Path) -> None:
    """Results and experiments that a command reads; what it is to write has a name of its own."""
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![-\w/])((?:benchmarks|docs|scripts|src|tests)/[\w./-]*\w)", text))
    assert [name for name in sorted(named) if "FILE" not in name and not (ROOT / name).exists()] == []


@named
def test_commands_exist(document: Path) -> None:
    """Every `linvit verb` a document shows is a verb and has the options shown, and every `make target` a target."""
    from tests.cli.test_cli import commands

    verbs = {name.split()[0] for name, _ in commands()}
    options = {name: {opt for p in found.params for opt in (*p.opts, *p.secondary_opts)} for name, found in commands()}
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"(?:^ *|`|-m )linvit ([a-z][^`\n]*)", text, re.MULTILINE):
        verb = next((name for name in options if f"{line} ".startswith(f"{name} ")), None)
        shown = set(re.findall(r"(?<= )--[a-z][a-z-]*", line))
        assert verb is None or shown <= {*options[verb], "--help"}, line
    assert set(re.findall(r"(?:^    |`)linvit ([a-z]+)", text, re.MULTILINE)) <= verbs
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE)) <= targets


@named
def test_commands_can_be_copied_with_what_is_said_of_them(document: Path) -> None:
    """What stands behind a command is a comment: it would be taken for arguments where the block is copied whole."""
    bare = r"^    (?:linvit|pip|make|python|benchmarks/\S+)\b.*\S {3,}[^#\s\\-].*$"
    found = re.findall(bare, document.read_text(encoding="utf-8"), re.MULTILINE)
    assert [line for line in found if " # " not in line] == []


@pytest.mark.parametrize(
    "document",
    [
        ROOT / "README.md",
        *(
            ROOT / "docs" / name
            for name in ("index.md", "conversion.md", "training.md", "features.md", "dense.md", "comparison.md")
        ),
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


@named
def test_it_shows_nothing_but_what_is_public(document: Path) -> None:
    """No import from deeper than one level below linvit, and no option by the name that another verb gives it."""
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"(?:from|import) linvit\.\w+\.[\w.]+", text) == []
    text = re.sub(r"linvit export .* --to", "", text)  # the one verb that has it, for a runtime
    assert re.findall(r"--(?:to|candidates|resolution|input-size|sizes)\b|accelerate launch|\binput_size=", text) == []


@named
def test_python_parses(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 500


def test_readme_has_the_numbers_that_were_measured() -> None:
    """Speeds as the result files have them, accuracies as the tables of docs/results.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    kernel = {
        (row["tokens"], row["implementation"]): row["graph_ms"]["median"]
        for row in measured("op-stella-h200")
        if row["pass"] == "forward"
    }
    model = {
        (row["resolution"], row["attention"]): row["images_per_second"]
        for row in measured("model-deit_small-stella-h200")
        if (row["pass"], row["mode"]) == ("inference", "graph")
    }
    small, large = (kernel[tokens, "sdpa"] / kernel[tokens, "ours"] for tokens in (196, 12544))
    near, far = (model[size, "converted"] / model[size, "softmax"] for size in (224, 1792))
    found = re.findall(r"\| ([\d.]+)× \|", readme)
    assert found == [f"{small:.2f}", f"{large:.0f}", f"{near:.2f}", f"{far:.2f}"]
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    points = re.findall(r"\| ([+−][\d.]+ \[.*?\]) \|", readme)
    assert len(points) == 2 and all(f"| {point} |" in results for point in points)


def measured(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return rows


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {__version__}," in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
