"""Backbones compared by their features: kNN and probe beside the teacher's own, image by image."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import features

import linvit
from linvit.codec import to_plain
from linvit.comparison import Comparison, Measure, compare
from linvit.comparison.description.request import survey
from linvit.comparison.description.spec import load
from linvit.comparison.reporting import gather, render
from linvit.comparison.reporting.text import markdown, spreadsheet
from linvit.comparison.scheduling.execution import running
from linvit.comparison.scheduling.execution.running import execute
from linvit.comparison.scheduling.execution.sharing import Shared
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from linvit.tasks.classify.metrics import paired_difference
from tests.comparison.jobs import runs_of, without_timings
from tests.tasks.features.pictures import backbone, write_tiles

SHORT = ("epochs=2", "batch_size=16", "precision=fp32", "warmup_epochs=0", "eval_epochs=1")
SPECS = Path(__file__).parents[2] / "benchmarks" / "comparisons"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    running.SHARED = Shared()
    yield
    running.SHARED = Shared()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    write_tiles(folder / "labelled", labelled=True)
    write_tiles(folder / "photos")
    linvit.save(backbone(), folder / "original")
    return folder


def asked(place: Path, **changes: Any) -> Comparison:
    given: dict[str, Any] = {
        "mode": "distil",
        "task": "features",
        "plans": ("relu_linear", "relu_linear:centre=true"),
        "data": str(place / "labelled"),
        "teacher": str(place / "original"),
        "settings": SHORT,
        "seeds": (0, 1),
        "measure": Measure(size=()),
    }
    return Comparison(**{**given, **changes})


@pytest.fixture(scope="module")
def store(place: Path) -> Store:
    found = Store(place / "store")
    assert compare(asked(place), found.folder).complete
    return found


def test_a_run_is_judged_as_evaluate_does(place: Path, store: Store) -> None:
    runs = runs_of(store)
    assert len(runs) == 4
    wanted = linvit.evaluate(place / "original", place / "labelled", device="cpu", workers=0)
    for run in runs:
        found = run.accuracy
        assert found.metric == "knn" and found.score == found.metrics["knn"] == found.epochs[-1].score
        assert found.metrics["teacher_knn"] == run.conversion.teacher_score == pytest.approx(wanted.metrics()["knn"])
        assert (run.right_by("teacher_probe")[1] == wanted.probe).all() and run.right.mean() * 100 == found.score
        assert 50 < found.metrics["patch_cosine"] <= 100 and run.identity.task == "features" and not run.drift
        assert [epoch.epoch for epoch in found.epochs] == [0, 0.25, 0.5, 1, 2, 2.25]  # a stage has one step at least
        assert (run.data.train, run.data.validation, run.model.tokens) == (72, 24, 16)


def test_differences_are_to_the_teacher_image_by_image(store: Store) -> None:
    (setting,) = gather([store.folder]).settings
    runs = sorted(runs_of(store), key=lambda run: run.seed)
    for row in setting.rows:
        mine = [run for run in runs if run.label.candidate == row.label.candidate]
        for delta, ours, name in ((row.delta, "knn", "teacher_knn"), (row.deltas["probe"], "probe", "teacher_probe")):
            a = [run.right if ours == "knn" else run.right_by(ours)[1] for run in mine]
            b = [run.right_by(name)[1] for run in mine]
            apart = paired_difference(np.array(a), np.array(b))
            assert (delta.mean, delta.interval) == (pytest.approx(apart.mean), pytest.approx(apart.interval))
            assert (delta.seeds, delta.images) == (2, 24) and row.against == "the teacher"


def test_the_report_speaks_of_features(store: Store) -> None:
    contents = gather([store.folder])
    text = markdown(contents)
    assert contents.settings[0].title.startswith("Features aligned on labelled, vit_tiny_patch16_224, recipe fast, 2")
    assert "| candidate | kNN, % | Δ teacher, points | probe, % (Δ) | neighbours, % | patch cosine, % |" in text
    assert "Features: nothing was learnt from labels" in text and "mAP and mIoU" not in text
    assert "kNN" in contents.answer.sentences[0] and "teacher_probe" in spreadsheet(contents)
    assert "Features aligned on labelled" in render(contents) and not contents.results.notes


def test_a_killed_run_ends_with_the_same_result(place: Path, tmp_path: Path) -> None:
    job = next(job for job in survey(asked(place, settings=(*SHORT, "checkpoint_seconds=0", "log_steps=1")))[0])
    whole = execute(job, Store(tmp_path / "whole"), device="cpu")

    class Killed(BaseException):
        pass

    def kill(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        execute(job, Store(tmp_path / "cut"), device="cpu", watch=kill)
    again = execute(job, Store(tmp_path / "cut"), device="cpu")
    assert without_timings(again) == without_timings(whole)


def test_without_labels_the_cosine_counts(place: Path, tmp_path: Path) -> None:
    comparison = asked(place, data=str(place / "photos"), plans=("relu_linear",))
    store = Store(tmp_path)
    assert compare(comparison, store.folder).complete
    for run in runs_of(store):
        assert run.accuracy.metric == "cosine" and not run.accuracy.correct and run.accuracy.standard_error is None
        assert run.conversion.teacher_score == 100 and run.score < 100
    (setting,) = gather([store.folder]).settings
    (row,) = setting.rows
    assert row.delta.mean == pytest.approx(row.score.mean - 100) and row.delta.images == 0 and not row.deltas
    with pytest.raises(LinvitError, match="photos has no labels to train a teacher with: give teacher"):
        survey(replace(comparison, teacher="", architecture={"model": "vit"}))


def test_a_teacher_that_is_trained_first_is_no_row(place: Path, tmp_path: Path) -> None:
    """It is judged by what it answers, they by what it gives; and its key is that of a plain distillation's."""
    shape = {"model": "vit", "width": 16, "depth": 1, "heads": 2}
    settings = ("epochs=1", "batch_size=24", "precision=fp32", "randaugment=none", "warmup_epochs=0", "repeats=1")
    given: dict[str, Any] = {"architecture": shape, "teacher": "", "size": (32,), "patch_size": (8,), "seeds": (0,)}
    comparison = asked(place, plans=("relu_linear",), teacher_settings=settings, **given)
    jobs, _ = survey(comparison)
    plain, _ = survey(replace(comparison, task="", recipe="fast"))
    assert [job.kind for job in jobs] == ["teacher", "run"] and jobs[0].key == plain[0].key
    assert jobs[1].key != plain[1].key and "task" not in to_plain(plain[1].identity)
    assert compare(comparison, tmp_path).complete
    (setting,) = gather([tmp_path]).settings
    assert [row.is_teacher for row in setting.rows] == [False] and setting.rows[0].delta is not None


def test_ablations_are_paired_with_what_they_vary(place: Path, store: Store) -> None:
    found = features.groups(runs_of(store))
    assert set(found) == {("relu_linear", ""), ("relu_linear:centre=true", "")}
    row, base = found["relu_linear:centre=true", ""], found["relu_linear", ""]
    delta = features.between(row, features.base_of(found, "relu_linear:centre=true", ""), "knn")
    rights = ([run.right for run in each.runs] for each in (row, base))
    assert delta.mean == pytest.approx(paired_difference(*map(np.array, rights)).mean)
    assert features.base_of(found, "relu_linear", "") is None
    changed = {**found, ("relu_linear", "lr=1"): row}
    assert features.base_of(changed, "relu_linear", "lr=1") is base
    assert "| `relu_linear:centre=true` |" in features.tables(found).rpartition("paired with")[2]


@pytest.mark.parametrize("name", ["features", "features-ablations"])
def test_the_experiments_can_be_run(name: str, place: Path) -> None:
    """With a smaller model on another set here."""
    comparison = replace(load(SPECS / f"{name}.toml"), data=str(place / "labelled"))
    comparison = replace(comparison, architecture={**comparison.architecture, "width": 24, "depth": 7})
    jobs, left_out = survey(comparison)
    runs = [job for job in jobs if job.kind == "run"]
    assert len({job.key for job in runs}) == len(runs) == (27 if name == "features" else 90) and not left_out
    assert all(job.training.task == "features" and job.training.seed in (0, 1, 2) for job in runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "scratch", "teacher": ""}, 'task features learns a teacher\'s features, so set mode = "distil"'),
        ({"task": "feature"}, "unknown task 'feature'; did you mean features"),
        ({"teacher": "", "architecture": {"model": "semantic_fpn"}}, "and semantic_fpn learns maps"),
        ({"recipe": "distil"}, "unknown recipe of features 'distil'"),
    ],
)
def test_mistakes(place: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        survey(asked(place, **changes))
