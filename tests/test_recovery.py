"""The recovery experiment's table and picture, from a store with two recipes and three budgets."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from scripts import recovery

from tests.comparison.synthetic import run, write

GOALS = {("distil", 2): 60.0, ("fast", 2): 66.0, ("distil", 20): 74.0, ("fast", 20): 74.0}


def store(folder: Path) -> Path:
    for (recipe, epochs), goal in GOALS.items():
        for name, less in (("softmax", 0.0), ("stella", 6.0)):
            for seed in (0, 1, 2):
                made = run(name, 8, seed, "distil", epochs, goal - less, {"name": "abcd", "digest": None})
                made["identity"]["config"]["recipe"] = recipe
                made["key"] = hashlib.sha256(repr((name, recipe, epochs, seed)).encode()).hexdigest()[:16]
                write(folder / "runs" / f"{made['key']}.json", made)
    return folder


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """All tables of a page as one, by candidate and column."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in line.split("|")[1:-1]]
        if cells and cells[0] == "candidate":
            columns = cells
        elif cells and cells[0] != "---":
            found.setdefault(cells[0], {}).update(zip(columns, cells, strict=True))
    return found


def test_tables_and_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.png"
    stages = [{"prepare_seconds": 0.0}, {"prepare_seconds": 2.0}]
    timed = {"attention": "stella", "status": "ok", "seconds": 10.0, "stages": stages}
    speeds = {"recipe": {"recipe": "fast", "epochs": 16}, "rows": [timed, {"attention": "x", "status": "wrong"}]}
    (tmp_path / "speeds.json").write_text(json.dumps(speeds))
    found = recovery.read_speeds([tmp_path / "speeds.json"])
    assert found.rates == {("fast", "stella"): 2.0}
    assert [found.seconds("stella", "fast", epochs) for epochs in (16, 8)] == [10.0, 6.0]  # what is solved is no epoch
    recovery.main(store(tmp_path / "store"), page, picture, [tmp_path / "speeds.json"])
    rows = rows_of(page.read_text())
    assert rows["stella"].pop("fast") == "12.0"  # an empty column is left out
    assert picture.with_stem("picture-seconds").stat().st_size > 10_000
    assert list(rows) == ["softmax", "stella"] and rows["stella"]["seeds of fast, 20"] == "3"
    gain, low = rows["stella"]["fast − distil, 2"].split(" [")
    assert 4 < float(gain) < 8 and float(low.split(",")[0]) > 0
    assert abs(float(rows["stella"]["fast − distil, 20"].split()[0])) < 2
    assert float(rows["stella"]["to softmax, both by fast, 20"].split()[0]) < -4
    assert rows["softmax"]["to softmax, both by fast, 20"] == ""
    assert float(rows["stella"]["fast, 2"]) > float(rows["stella"]["distil, 2"])
    assert picture.stat().st_size > 10_000
    page.write_text("# Results\n<!-- store -->\nold\n<!-- /store -->\nThe end.\n")
    recovery.main(store(tmp_path / "store"), page, picture)
    text = page.read_text()
    assert text.startswith("# Results\n") and text.endswith("The end.\n") and "old" not in text
    assert rows_of(text) == rows


def test_recipes_at_the_same_seconds(tmp_path: Path) -> None:
    found = recovery.cells(recovery.read([store(tmp_path / "store")]).runs)
    speeds = recovery.Speeds({("distil", "stella"): 2.0, ("fast", "stella"): 1.25}, {("fast", "stella"): 0.4})
    plain = [found["stella", "distil", epochs].top1 for epochs in (2, 20)]  # after 1 and 10 seconds
    share = math.log10(2)  # of the way from the one to the other that 2 seconds are
    wanted = found["stella", "fast", 2].top1 - plain[0] - share * (plain[1] - plain[0])
    assert recovery.ahead_in_time(found, speeds, "stella", 2) == f"{wanted:+.1f}"
    assert recovery.ahead_in_time(found, speeds, "stella", 20) == ""  # plain distillation was never run so long
    assert recovery.ahead_in_time(found, speeds, "softmax", 2) == ""  # never timed


def test_plain_distillation_that_lasts_longer(tmp_path: Path) -> None:
    """It says what as many seconds would have given, and the tables stay those of the longest budget of both."""
    made = store(tmp_path / "store")
    longer = run("stella", 8, 0, "distil", 40, 71.0, {"name": "abcd", "digest": None})
    longer["identity"]["config"]["recipe"] = "distil"
    write(made / "runs" / f"{'f' * 16}.json", {**longer, "key": "f" * 16})
    rates = {("distil", "stella"): 2.0, ("fast", "stella"): 1.25}
    text = recovery.tables(recovery.cells(recovery.read([made]).runs), recovery.Speeds(rates))
    rows = rows_of(text)
    assert rows["stella"]["distil, 40"] and "fast, 40" not in rows["stella"]
    assert "fast − distil, 40" not in rows["stella"] and "to softmax, both by fast, 20" in rows["stella"]
    assert float(rows["stella"]["fast, 20 − distil, 40"].split()[0]) < 0  # the paired difference, longer one and all
    assert rows["stella"]["same seconds, 20"] and "after 20 epochs" in text


def test_one_budget_is_drawn_too(tmp_path: Path) -> None:
    made = store(tmp_path / "store")
    for file in made.glob("runs/*.json"):
        if round(json.loads(file.read_text())["identity"]["config"]["epochs"]) != 20:
            file.unlink()
    recovery.main(made, tmp_path / "page.md", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
