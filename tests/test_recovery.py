"""The recovery experiment's table and picture, from a store with two recipes and three budgets."""

from __future__ import annotations

import hashlib
from pathlib import Path

from scripts import recovery

from tests.comparison.synthetic import run, write

GOALS = {("distil", 2): 60.0, ("fast", 2): 66.0, ("distil", 20): 74.0, ("fast", 20): 74.0}


def store(folder: Path) -> Path:
    for (recipe, epochs), goal in GOALS.items():
        for name, less in (("softmax", 0.0), ("stella", 6.0)):
            for seed in (0, 1, 2):
                made = run(name, 8, seed, "distil", epochs, goal - less, "abcd")
                made["identity"]["config"]["recipe"] = recipe
                made["key"] = hashlib.sha256(repr((name, recipe, epochs, seed)).encode()).hexdigest()[:16]
                write(folder / "runs" / f"{made['key']}.json", made)
    return folder


def test_table_and_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.png"
    recovery.main(store(tmp_path / "store"), page, picture)
    head, rule, *lines = page.read_text().splitlines()
    columns = [cell.strip() for cell in head.split("|")[1:-1]]
    assert len(rule.split("|")) == len(head.split("|"))
    rows = {
        (cells := [c.strip() for c in line.split("|")[1:-1]])[0]: dict(zip(columns, cells, strict=True))
        for line in lines
    }
    assert set(rows) == {"softmax", "stella"} and rows["stella"]["seeds"] == "3"
    gain, low = rows["stella"]["fast − distil, 2"].split(" [")
    assert 4 < float(gain) < 8 and float(low.split(",")[0]) > 0
    assert abs(float(rows["stella"]["fast − distil, 20"].split()[0])) < 2
    assert float(rows["stella"]["fast − softmax by fast, 20"].split()[0]) < -4
    assert rows["softmax"]["fast − softmax by fast, 20"] == ""
    assert float(rows["stella"]["fast 2"]) > float(rows["stella"]["distil 2"])
    assert picture.stat().st_size > 10_000
