"""What a report says, from stores with known contents."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linvit.comparison.reporting import Contents, gather, markdown, render, spreadsheet
from linvit.comparison.reporting.answer import TOLERANCES, main_rows
from linvit.comparison.reporting.caveats import caveats
from linvit.comparison.reporting.payload import apart
from linvit.errors import LinvitError
from linvit.tasks.classify.metrics import paired_difference
from tests.comparison.synthetic import MECHANISMS, row_of, write_store


def test_seeds_make_one_row(scratch: Contents) -> None:
    assert len(scratch.settings) == 1
    assert len(scratch.settings[0].rows) == 2 * len(MECHANISMS)
    row = row_of(scratch, "stella")
    assert row.seeds == [0, 1, 2]
    assert row.score.mean == pytest.approx(np.mean([run.score for run in row.runs]))
    assert row_of(scratch, "stella", 8).seeds == [0]


def test_difference_pairs_seeds_and_images(scratch: Contents) -> None:
    row, softmax = row_of(scratch, "hydra"), row_of(scratch, "softmax")
    expected = paired_difference([run.right for run in row.runs], [run.right for run in softmax.runs])
    assert row.delta is not None and row.against == "softmax"
    assert row.delta.interval == expected.interval and row.delta.seeds_interval == expected.seeds_interval
    assert row.delta.clear and row.delta.mean < -3
    assert softmax.delta is None
    single = row_of(scratch, "hydra", 8)
    assert single.delta is not None and single.delta.seeds == 1 and single.baseline is row_of(scratch, "softmax", 8)


def test_without_softmax_the_teacher_is_the_baseline(distil: Contents) -> None:
    row, teacher = row_of(distil, "stella"), row_of(distil, "softmax (teacher)")
    assert row.against == "the teacher" and row.baseline is teacher and teacher.is_teacher
    expected = paired_difference([run.right for run in row.runs], [teacher.first.right] * 3)
    assert row.delta is not None and row.delta.interval == expected.interval
    assert "against the teacher's" in distil.answer.sentences[1]


def test_a_teacher_from_elsewhere_has_its_accuracy_only(tmp_path: Path) -> None:
    store = write_store(tmp_path, mode="distil", mechanisms=["stella", "qt"], patches=[4])
    for path in store.glob("runs/*.json"):
        data = json.loads(path.read_text())
        if data["kind"] == "teacher":
            path.unlink()
        else:
            data["identity"]["teacher"] = {"name": "deit", "digest": "0123456789abcdef"}
            path.write_text(json.dumps(data))
    contents = gather([store])
    row = row_of(contents, "stella")
    assert row.delta is not None and row.delta.images == 0
    assert row.delta.mean == pytest.approx(row.score.mean - 89.0)


def test_speeds_join_by_candidate(scratch: Contents) -> None:
    row = row_of(scratch, "stella")
    ways = {(speed.device, speed.what, speed.many) for speed in row.ladders}
    assert ways == {
        (d, w, m) for d in ("cpu", "cuda") for w, m in (("inference", False), ("inference", True), ("training", True))
    }
    many = next(s for s in row.ladders if s.device == "cuda" and s.what == "inference" and s.many)
    assert [t.tokens for t in many.points] == [256, 1024, 4096, 16384]
    softmax = next(s for s in row_of(scratch, "softmax").ladders if s.same_clock(many))
    assert many.memory is not None and softmax.memory is not None
    assert many.memory.exponent == pytest.approx(1, abs=0.05) and softmax.memory.exponent > 1.3


def test_speeds_of_other_precisions_do_not_mix(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4], devices=["cuda"])
    for path in list(store.glob("speeds/*.json")):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            row.update(precision="fp32", compiled=True, cuda_graph=False)
        data["key"] = data["key"][::-1]
        (store / "speeds" / f"{data['key']}-h200.json").write_text(json.dumps(data))
    row = row_of(gather([store]), "qt")
    assert {speed.chip for speed in row.ladders} == {"NVIDIA H200, bf16, CUDA graph", "NVIDIA H200, fp32, compiled"}


def test_speeds_join_by_structure_where_the_key_does_not(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4])
    for path in store.glob("speeds/*.json"):
        data = json.loads(path.read_text()) | {"candidate_key": "0" * 16}
        path.write_text(json.dumps(data))
    assert len(row_of(gather([store]), "qt").ladders) == 6


def test_the_answer_names_mechanisms_tokens_and_doubt(scratch: Contents) -> None:
    first, second = scratch.answer.sentences
    assert "NVIDIA H200" in first and "batches of 64" in first and "at most 1 point" in first
    assert "stella from 1,024 to 16,384 tokens" in first and "beyond 4,096 softmax runs out of memory" in first
    row, softmax = row_of(scratch, "stella"), row_of(scratch, "softmax")
    assert f"{row.score.mean:.1f} %" in second and f"{softmax.score.mean:.1f} %" in second
    assert row.delta is not None and not row.delta.clear
    assert "3 paired seeds do not tell from zero" in second
    rows = [row.delta for row in main_rows(scratch.settings[0]) if row.delta]
    worse = sum(delta.clear and delta.mean < 0 for delta in rows)
    assert f"{worse} are clearly worse" in second


def test_softmax_that_was_too_slow_to_time_is_said_to_be_so(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "stella"], patches=[4], devices=["cuda"])
    for path in store.glob("speeds/*.json"):
        text = path.read_text().replace("out of memory", "left out: about 11 s a pass")
        path.write_text(text)
    first = gather([store]).answer.sentences[0]
    assert "beyond 4,096 softmax was not timed" in first


def test_without_ratios_times_decide_and_softmax_wins_ties(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "stella"], patches=[4], devices=["cuda"], sizes=[64, 256])
    for path in store.glob("speeds/*.json"):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            row["ratio"] = None
        path.write_text(json.dumps(data))
    found = {(ladder.many, pick.tokens): pick.name for ladder in gather([store]).answer.picks for pick in ladder.picks}
    assert found == {(True, 256): "stella", (True, 4096): "stella", (False, 256): "softmax", (False, 4096): "stella"}


def test_picks_keep_their_promise(scratch: Contents) -> None:
    assert {ladder.tolerance for ladder in scratch.answer.picks} == set(TOLERANCES)
    for ladder in scratch.answer.picks:
        for pick in ladder.picks:
            assert pick.row is not None
            assert pick.name == "softmax" or (pick.row.delta and pick.row.delta.mean >= -ladder.tolerance)
            assert pick.ratio is None or pick.ratio >= 1
    generous = [ladder for ladder in scratch.answer.picks if ladder.tolerance == 5.0]
    assert any(pick.name == "hydra" for ladder in generous for pick in ladder.picks)


def test_softmax_stays_where_nothing_is_faster(tmp_path: Path) -> None:
    contents = gather([write_store(tmp_path, mechanisms=["softmax", "performer", "hydra"], patches=[4])])
    assert "Keep softmax" in contents.answer.sentences[0]
    assert "2 are clearly worse" in contents.answer.sentences[1]


@pytest.mark.parametrize(
    "wanted, said",
    [
        ({"mechanisms": ["stella", "qt"]}, "Softmax was not trained here"),
        ({"mechanisms": ["softmax"]}, "nothing to compare it with"),
        ({"devices": ()}, "No speeds were measured"),
        ({"seeds": [0]}, "a single seed"),
        ({"sizes": [64]}, "at 256 tokens"),
    ],
)
def test_incomplete_stores_are_said_to_be_so(tmp_path: Path, wanted: dict, said: str) -> None:
    contents = gather([write_store(tmp_path, patches=[4], **wanted)])
    assert said in " ".join(contents.answer.sentences)
    assert "No speeds" not in contents.answer.sentences[0]  # what is known goes first
    assert render(contents) and markdown(contents) and spreadsheet(contents)


def test_only_speeds_or_only_failures_make_a_report(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4])
    shutil.rmtree(store / "runs")
    assert "No run has finished" in render(gather([store]))
    shutil.rmtree(store / "speeds")
    assert "CUDA out of memory" in markdown(gather([store]))


def test_damaged_files_are_left_out_and_named(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4])
    paths = sorted(store.glob("runs/*.json"))
    paths[0].write_text(paths[0].read_text()[:500])
    (store / "runs" / "notes.json").write_text("[1, 2]")
    data = json.loads(paths[1].read_text())
    paths[1].write_text(json.dumps(data | {"version": 99}))
    data = json.loads(paths[2].read_text())
    data["accuracy"]["correct"] = "AAAA"
    paths[2].write_text(json.dumps(data))
    contents = gather([store])
    assert len(contents.results.runs) == 4
    said = " ".join(caveats(contents.results, contents.settings))
    assert paths[0].name in said and "notes.json" in said and "version 99" in said
    assert f"Run {paths[2].stem}: the images' results do not fit" in said
    assert str(tmp_path) not in said


def test_the_same_run_in_two_stores_counts_once(tmp_path: Path) -> None:
    first = write_store(tmp_path / "a", mechanisms=["softmax", "qt"], patches=[4])
    second = write_store(tmp_path / "b", mechanisms=["softmax", "qt", "stella"], patches=[4])
    contents = gather([first, second])
    assert len(contents.results.runs) == 9 and len(contents.settings) == 1
    assert contents.results.failures and len(contents.results.failures) == 1


def test_failures_that_were_made_good_are_gone(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax"], patches=[4])
    key = json.loads(next(store.glob("runs/*.json")).read_text())["key"]
    failure = json.loads(next(store.glob("failures/*.json")).read_text())
    (store / "failures" / f"{key}-1.json").write_text(json.dumps(failure | {"key": key}))
    again = failure | {"attempt": 2, "error": "again"}
    (store / "failures" / f"{failure['key']}-2.json").write_text(json.dumps(again))
    assert [f.error for f in gather([store]).results.failures] == ["again"]


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(LinvitError, match="no result file"):
        gather([tmp_path])
    with pytest.raises(LinvitError, match="no store"):
        gather([tmp_path / "missing"])
    (tmp_path / "store.tar").write_bytes(b"")
    with pytest.raises(LinvitError, match="is no archive of a store"):
        gather([tmp_path / "store.tar"])


def test_settings_are_told_apart(tmp_path: Path) -> None:
    first = write_store(tmp_path / "a", mechanisms=["softmax", "qt"], epochs=5)
    second = write_store(tmp_path / "b", mechanisms=["softmax"], epochs=6)
    contents = gather([first, second])
    assert [len(setting.rows) for setting in contents.settings] == [4, 2]
    assert "5 epochs" in contents.settings[0].title and "6 epochs" in contents.settings[1].title
    assert apart(contents.settings) == ["5 epochs", "6 epochs"]
    assert apart(contents.settings[:1]) == [contents.settings[0].title]


def test_teachers_of_two_seeds_are_two_settings(tmp_path: Path) -> None:
    """The patches of one setting have a teacher each; another seed of teachers is another setting, and said to be."""
    stores = [
        write_store(tmp_path / str(n), mode="distil", mechanisms=["softmax", "qt"], teacher_seed=n) for n in (0, 3)
    ]
    contents = gather(stores)
    assert [len(setting.rows) for setting in contents.settings] == [6, 6]
    assert apart(contents.settings) == ["Teacher of seed 0", "Teacher of seed 3"]
    assert {row.delta.seeds for setting in contents.settings for row in setting.rows if row.delta} == {3, 1}


def test_a_setting_takes_in_runs_from_before_a_field_was_there(tmp_path: Path) -> None:
    """What a recipe did not have yet, has as its default, or does without effect, does not part its runs."""
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4])
    for file in sorted(store.glob("runs/*.json"))[:2]:
        data = json.loads(file.read_text())
        data["identity"]["config"] |= {
            "clip_value": None,
            "repeats": 1,
            "ema_ramp": 0,
            "eval_epochs": 7,
            "epochs": 30.0,
        }
        file.write_text(json.dumps(data))
    assert len(gather([store]).settings) == 1
    data["identity"]["config"]["clip_value"] = 0.5
    file.write_text(json.dumps(data))
    assert len(gather([store]).settings) == 2


def test_times_of_two_chips_stand_in_no_one_column(tmp_path: Path) -> None:
    store = write_store(tmp_path, mechanisms=["softmax", "qt"], patches=[4])
    for file in store.glob("speeds/*.json"):
        data = json.loads(file.read_text())
        if data["label"]["candidate"] == "qt":
            data["rows"] = [row for row in data["rows"] if row["device"] == "cpu"]
            file.write_text(json.dumps(data))
    text = markdown(gather([store]))
    rows = {line.split(" | ")[0]: line.split(" | ")[-3:] for line in text.splitlines() if line.count(" | ") == 9}
    assert rows["| qt"] == ["–", "–", "– |"] and "–" not in rows["| softmax"][0]
    assert "Timed on NVIDIA H200, bf16, CUDA graph." in text


def test_a_loss_that_is_not_ruled_out_is_named(tmp_path: Path) -> None:
    contents = gather([write_store(tmp_path, mechanisms=["softmax", "stella"], patches=[4])])
    delta = row_of(contents, "stella").delta
    assert delta is not None and delta.interval is not None and not delta.clear and delta.interval[0] < -1
    assert "do not tell from zero nor from a loss of more than 1 point" in contents.answer.sentences[1]


SMALL = {"mechanisms": ["softmax", "stella"], "patches": [4], "sizes": (64,), "seeds": (0,), "epochs": 2}


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in plain data, of lists the first only."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data[:1]):
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, name))


@pytest.mark.parametrize("folder", ["runs", "speeds", "failures"])
def test_one_bad_file_does_not_poison_a_store(folder: str, tmp_path: Path) -> None:
    """Infinity, which JSON writes as a large number, another type, nothing: left aside with a note, or reported."""
    store = write_store(
        tmp_path / "s", mechanisms=["softmax", "stella"], patches=[4], sizes=(64,), seeds=(0,), epochs=2
    )
    path = min(store.glob(f"{folder}/*.json"))
    text, chance, noted = path.read_text(), random.Random(0), 0
    whole = gather([store])
    for place in leaves(json.loads(text)):
        data = json.loads(text)
        inner = data
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = chance.choice([float("inf"), 10**40, "x", None, 0, -1, [], {"a": 1}])
        path.write_text(json.dumps(data).replace("Infinity", "1e999"))
        contents = gather([store])
        markdown(contents), spreadsheet(contents), render(contents)
        noted += len(contents.results.notes) > len(whole.results.notes)
    assert noted > 5


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "1" + "0" * 400, "[" * 100_000])
def test_numbers_that_are_none_are_left_aside(text: str, tmp_path: Path) -> None:
    store = write_store(
        tmp_path / "s", mechanisms=["softmax", "stella"], patches=[4], sizes=(64,), seeds=(0,), epochs=2
    )
    path = min(store.glob("runs/*.json"))
    path.write_text(re.sub(r'"seconds": [0-9.]+', f'"seconds": {text}', path.read_text()))
    notes = gather([store]).results.notes
    assert any(f"runs/{path.name} was left aside: it is damaged" in note for note in notes)
