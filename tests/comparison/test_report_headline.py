"""The report's headline, its counts and its names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from linvit.comparison.reporting import Contents, gather, render
from linvit.comparison.reporting.payload import facts, payload
from linvit.comparison.statistics.naming import readable
from tests.comparison.synthetic import write_store


@pytest.mark.parametrize(
    "candidate, name",
    [
        ("relu_linear", "relu_linear"),
        ("xca:lpi=true", "XCA + LPI"),
        ("xca:lpi=true,variant=fair", "XCA + LPI (fair)"),
        ("window:window=8", "window 8 × 8"),
        ("mixa:keep=6,where=last", "mixa, 6 quadratic, last"),
        ("performer:variant=fair,features=64", "performer, features 64 (fair)"),
        ("agent:bias=false", "agent, no bias"),
    ],
)
def test_names_are_readable(candidate: str, name: str) -> None:
    assert readable(candidate) == name


def test_the_headline_leads_with_the_answer_then_data_then_hardware(scratch: Contents) -> None:
    (headline,) = re.findall(r"<h1.*?>(.*?)</h1>", render(scratch))
    order = [
        "Take ",
        "as fast as softmax",
        "ten classes, 9,469 training images, 128 px",
        "NVIDIA H200",
        "batches of 64",
    ]
    places = [headline.find(part) for part in order]
    assert places[0] == 0 and -1 not in places and places == sorted(places)


def test_counts_and_answer_are_of_the_setting_shown(tmp_path: Path) -> None:
    first = write_store(tmp_path / "a", mechanisms=["softmax", "stella", "qt"], patches=[4], epochs=5)
    second = write_store(tmp_path / "b", mechanisms=["softmax", "hydra"], patches=[4], seeds=[0, 1], mode="distil")
    contents = gather([first, second])
    assert [len(setting.rows) for setting in contents.settings] == [3, 3]
    said = {setting.mode: facts(contents, setting) for setting in contents.settings}
    assert "9 runs · 3 candidates · 3 seeds" in said["scratch"] and "5 epochs" in said["scratch"]
    assert "4 runs · 2 candidates · 2 seeds" in said["distil"]
    shown = payload(contents)["settings"]
    assert [setting["facts"] for setting in shown] == [facts(contents, setting) for setting in contents.settings]
    answers = {setting["mode"]: "".join(map("".join, setting["answer"])) for setting in shown}
    assert "stella" in answers["scratch"] and "stella" not in answers["distil"]


def test_what_it_was_made_with_is_folded(scratch: Contents) -> None:
    assert "<details><summary>Made with</summary><dl>" in render(scratch)
