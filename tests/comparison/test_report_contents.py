"""What stands in a report beside the answer: the papers, the caveats, and its other forms."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from linvit.comparison.reporting import Contents, gather, markdown, render, spreadsheet
from linvit.comparison.reporting.answer import main_rows
from linvit.comparison.reporting.caveats import caveats, inferred
from linvit.comparison.reporting.payload import HUES, MARKERS, SAFE_HUES, payload, styles, thinned
from linvit.comparison.reporting.published import FAIR, claims, rankings
from linvit.measurement.published import TABLES
from linvit.tasks.classify.metrics import paired_difference
from tests.comparison.synthetic import row_of, write_store


def test_the_fair_comparisons_order_is_beside_ours(scratch: Contents) -> None:
    fine, coarse = rankings(scratch.settings[0])
    assert (fine.section, fine.patch, coarse.patch) == ("Patches of 4 pixels", 4, 8)
    assert len(fine.places) == 8 and fine.ranks is not None and fine.ranks[0] > 0.5
    first = next(place for place in fine.places if place.label == "SA-4")
    assert (first.theirs.accuracy, first.their_rank, first.row.name) == ("81.80", 1, "softmax")
    assert next(p for p in fine.places if p.label == "LPI-4").row.name == "XCA + LPI (fair)"
    assert len(fine.by_seed) == 3 and len(coarse.by_seed) == 1
    printed = [row.label.rpartition("-")[0] for section in TABLES["fair"].sections[:2] for row in section.rows]
    assert set(printed) == set(FAIR)


def test_pairs_that_are_told_apart_agree_with_the_paper_or_not(scratch: Contents) -> None:
    fine, _ = rankings(scratch.settings[0])
    agreeing, contrary = 0, []
    for a, b in combinations(fine.places, 2):
        found = paired_difference([run.right for run in a.row.runs], [run.right for run in b.row.runs])
        if found.interval[0] > 0 or found.interval[1] < 0:
            same = (found.mean > 0) == (float(a.theirs.accuracy) > float(b.theirs.accuracy))
            agreeing += same
            contrary += [] if same else [{a.row.name, b.row.name}]
    assert fine.agreeing == agreeing > 10
    assert [set(pair) for pair in fine.contrary] == contrary
    assert f"{agreeing} in the paper's order, {len(contrary)} against it" in fine.verdict()


def test_the_papers_claims_are_beside_ours(scratch: Contents) -> None:
    found = claims(main_rows(scratch.settings[0]))
    assert {claim.paper for claim in found} == {"MixA", "Mobile-Attention", "Castling-ViT"}
    mobile = next(claim for claim in found if claim.model == "DeiT-T" and claim.paper == "Mobile-Attention")
    delta = row_of(scratch, "mobile").delta
    assert mobile.theirs == pytest.approx(1.1) and delta is not None and mobile.difference == delta.mean


def test_qt_is_compared_with_relu_linear(tmp_path: Path) -> None:
    contents = gather([write_store(tmp_path, mechanisms=["softmax", "qt", "relu_linear"], patches=[4])])
    found = [claim for claim in claims(main_rows(contents.settings[0])) if claim.paper == "QT-ViT"]
    assert len(found) == 6 and found[0].theirs == pytest.approx(0.21)
    ours = row_of(contents, "qt").score.mean - row_of(contents, "relu_linear").score.mean
    assert found[0].difference == pytest.approx(ours) and found[0].interval is not None


def test_caveats_say_what_the_files_call_for(scratch: Contents) -> None:
    said = " ".join(caveats(scratch.results, scratch.settings))
    for part in ("15 of 30 rows rest on a single seed", "shared their device", "in half precision: performer"):
        assert part in said
    assert "1 job failed" in said


def test_inferred_formulas_are_called_inferred() -> None:
    said = dict(inferred({"mixa", "mobile", "efficient"}))
    assert any("formula is inferred" in text for name, text in said.items() if name == "stella")
    assert "mobile" in said and "mixa" in said and "efficient" not in said


def test_every_candidate_has_its_own_colour() -> None:
    many = ["softmax", *(f"mechanism{i}" for i in range(22)), "xca", "xca:variant=fair"]
    made = styles(many)
    assert len({(style["hue"], style["shade"]) for style in made.values()}) == len(many)
    assert made["softmax"]["hue"] == -1 and made == styles(reversed(many))
    assert all(-1 <= style["hue"] < HUES and 0 <= style["marker"] < MARKERS for style in made.values())
    few = styles(["softmax", "qt", "xca", "xca:lpi=true"])
    assert all(style["hue"] < SAFE_HUES and not style["shade"] for style in few.values())


def test_long_curves_keep_their_ends() -> None:
    kept = thinned(1000)
    assert len(kept) == 150 and kept[0] == 0 and kept[-1] == 999
    assert thinned(7) == list(range(7))


def test_payload_keeps_each_config_once_and_no_bits(scratch: Contents) -> None:
    data = payload(scratch)
    assert len(data["environments"]) == 1 and len(data["configs"]) == len(data["rows"])
    text = json.dumps(data)
    assert scratch.results.runs[0].accuracy.correct not in text
    run = data["rows"][0]["runs"][0]
    assert run["command"].endswith(run["key"])


def test_markdown_tables_are_whole(scratch: Contents, distil: Contents) -> None:
    for contents in (scratch, distil):
        text = markdown(contents)
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(widths) == 1, block
    assert "| stella | " in markdown(scratch) and "Kendall's τ" in markdown(scratch)
    assert "zero-shot" in markdown(distil)


def test_csv_has_a_line_for_each_run_and_timing(scratch: Contents) -> None:
    lines = list(csv.DictReader(io.StringIO(spreadsheet(scratch))))
    kinds = [line["kind"] for line in lines]
    assert kinds.count("run") == len(scratch.results.runs) and kinds.count("speed") == sum(
        len(speed.rows) for speed in scratch.results.speeds
    )
    line = next(line for line in lines if line["kind"] == "run" and line["candidate"] == "qt" and line["seed"] == "1")
    run = next(run for run in scratch.results.runs if run.key == line["key"])
    assert float(line["top1"]) == run.score and line["hardware"] == "NVIDIA H200"


def test_files_text_stays_text(tmp_path: Path) -> None:
    evil = '=<script>alert("x")</script>|`*'
    contents = gather([write_store(tmp_path, mechanisms=["softmax", evil], patches=[4])])
    assert "<script>alert" not in markdown(contents) and "&lt;script&gt;" in markdown(contents)
    assert "<script>alert" not in render(contents)
    cells = {line["candidate"] for line in csv.DictReader(io.StringIO(spreadsheet(contents)))}
    assert f"'{evil}" in cells and evil not in cells


def test_the_documents_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_store(tmp_path / "runs" / "digits", mechanisms=["softmax", "stella"], patches=[4])
    document = Path(__file__).parents[2] / "docs" / "report.md"
    (example,) = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, document.name, "exec"), {})
    assert capsys.readouterr().out.startswith("Take stella from 256")


def test_a_claim_is_held_against_the_candidate_most_like_the_papers(tmp_path: Path) -> None:
    """Not against the best of several: where a quadratic layer lies is the paper's choice, not ours after the fact."""
    names = ["softmax", "mixa:keep=6,where=last", "mixa:keep=6", "mixa:keep=6,layers=measured"]
    store = write_store(tmp_path, mode="distil", mechanisms=names, patches=[8], devices=["cuda"], failures=False)
    rows = main_rows(gather([store]).settings[0])

    def chosen(rows: Any) -> str:
        (made,) = {claim.ours.label.candidate for claim in claims(rows)}
        return str(made)

    assert chosen(rows) == chosen(rows[::-1]) == "mixa:keep=6,layers=measured"
    counted = [row for row in rows if "measured" not in row.label.candidate]
    assert chosen(counted) == chosen(counted[::-1]) == "mixa:keep=6"
