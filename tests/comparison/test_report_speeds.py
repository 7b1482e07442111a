"""What a report says of speeds comes from the ratios that were taken side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from linvit.comparison.reporting import Contents, gather, markdown
from linvit.comparison.reporting.caveats import caveats
from linvit.comparison.reporting.payload import payload
from tests.comparison.synthetic import row_of, write_store


def test_ratios_rank_where_times_taken_alone_contradict_them(tmp_path: Path) -> None:
    """Softmax's own job met a slow machine: alone, stella has more images a second; side by side it is slower."""
    store = write_store(tmp_path, mechanisms=["softmax", "stella", "qt"], patches=[4], devices=["cuda"], sizes=[128])
    ratios = {"softmax": 1.0, "stella": 0.8, "qt": 1.5}
    per_second = {"softmax": 2557.0, "stella": 3369.0, "qt": 3009.0}
    for path in store.glob("speeds/*.json"):
        data = json.loads(path.read_text())
        name = data["label"]["candidate"]
        for row in data["rows"]:
            median = 1000 * row["batch"] / per_second[name]
            row |= {"ratio": ratios[name], "images_per_second": per_second[name]}
            row["milliseconds"] = {"median": median, "low": 0.99 * median, "high": 1.01 * median}
        path.write_text(json.dumps(data))
    contents = gather([store])
    many = next(ladder for ladder in row_of(contents, "stella").ladders if ladder.what == "inference" and ladder.many)
    assert many.times == pytest.approx([1000 / 2557 / 0.8]) and many.astray == {128: pytest.approx(3369 / 2557 / 0.8)}
    assert {pick.name for found in contents.answer.picks if found.tolerance == 5 for pick in found.picks} == {"qt"}
    text = markdown(contents)
    front = next(line for line in text.splitlines() if line.startswith("Nothing here is both faster"))
    assert "stella" not in front
    drawn = {row["name"]: row["ladders"] for row in payload(contents)["rows"]}
    at = {
        name: next(ladder["points"][0] for ladder in found if ladder["what"] == "inference" and ladder["many"])
        for name, found in drawn.items()
    }
    assert at["qt"]["time"] < at["softmax"]["time"] < at["stella"]["time"]
    assert [at[name]["astray"] for name in ("softmax", "stella", "qt")] == [False, True, True]
    said = " ".join(caveats(contents.results, contents.settings))
    assert "disagree by more than their spread" in said and "stella at 128 px" in said and "by up to 65 %" in said
    line = next(line for line in text.splitlines() if line.startswith("| stella"))
    assert "0.80×" in line and "3,369" in line and "images/s alone" in text


def test_times_within_their_spread_are_not_called_astray(scratch: Contents) -> None:
    assert not any(ladder.astray for row in scratch.settings[0].rows for ladder in row.ladders)
    assert "disagree by more" not in " ".join(caveats(scratch.results, scratch.settings))
