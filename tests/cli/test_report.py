"""`linvit report` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Outcome
from tests.comparison.synthetic import digest, write_store


def test_the_verb(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", mechanisms=["softmax", "stella"], patches=[4])
    page, text = tmp_path / "report.html", tmp_path / "report.md"
    outcome = linvit("report", str(store), "-o", str(page), "--md", str(text))
    assert outcome.code == 0 and "stella" in outcome.out and str(page) in outcome.out
    assert page.read_text().startswith("<!doctype html>") and text.read_text().startswith("Take stella")
    outcome = linvit("report", str(store), "--csv", "-")
    assert outcome.code == 0 and outcome.out.startswith("kind,setting")
    found = json.loads(linvit("report", str(store), "--json").out)
    assert [row["candidate"] for row in found["settings"][0]["rows"]].count("stella") == 1
    assert found["failures"][0]["key"] == digest(["inline", "scratch"])
    damaged = next((store / "runs").glob("*.json"))
    damaged.write_text("{}")
    outcome = linvit("report", str(store), "-o", str(page))
    assert outcome.code == 0 and f"{damaged.name} was left aside" in outcome.err


def test_archives_and_folders_make_one_report(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    stores = [
        write_store(tmp_path / name, mechanisms=["softmax", name], patches=[4], failures=False)
        for name in ("stella", "qt", "mobile")
    ]
    for store in stores[:2]:
        assert linvit("compare", "-o", str(store), "--pack", f"{store}.tar.xz").code == 0
    given = [f"{stores[0]}.tar.xz", f"{stores[1]}.tar.xz", str(stores[2])]
    packed = json.loads(linvit("report", *given, "--json").out)
    assert packed == json.loads(linvit("report", *map(str, stores), "--json").out)
    assert [row["candidate"] for row in packed["settings"][0]["rows"]] != [] and not packed["notes"]
    assert {row["candidate"] for row in packed["settings"][0]["rows"]} == {"softmax", "stella", "qt", "mobile"}


def test_the_verbs_mistakes_are_one_line(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", mechanisms=["softmax"], patches=[4])
    for args, said in (
        ((str(tmp_path / "none"),), "no store"),
        ((str(store), "--md", "-", "--csv", "-"), "only one"),
        ((str(store), "-o", str(tmp_path / "no" / "r.html")), "make it first"),
    ):
        outcome = linvit("report", *args)
        assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1
