"""Detectors and segmenters compared: one trunk for all, mAP or mIoU, and what paired seeds can tell."""

import csv
import io
import json
import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from scipy import stats

import linvit
from linvit.codec import to_plain
from linvit.comparison import Comparison, Measure, compare
from linvit.comparison.description.building import build_model
from linvit.comparison.description.request import survey
from linvit.comparison.reporting import Contents, gather, render
from linvit.comparison.reporting.text import markdown, spreadsheet
from linvit.comparison.results import Run
from linvit.comparison.scheduling import estimate
from linvit.comparison.scheduling.execution import running
from linvit.comparison.scheduling.execution.passes import is_finite, training_pass
from linvit.comparison.scheduling.execution.running import execute
from linvit.comparison.scheduling.execution.sharing import Shared
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from tests.comparison.jobs import runs_of, speeds_of, without_timings
from tests.comparison.test_running import run_and_die
from tests.dense_shapes import NAMES, write_boxes, write_masks

PLAIN = "vit_tiny_patch16_224"
TRUNK: dict[str, Any] = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SHORT = ("epochs=1", "batch_size=2", "precision=fp32", "warmup_epochs=0", "eval_epochs=0.5", "lr=1e-3")
NARROW = {"pyramid_args": {"width": 64}}
HEAD: dict[str, Any] = {"model": "semantic_fpn", "channels": 64, "head_channels": 64, **NARROW}
SMALL: dict[str, Any] = {"width": 8, "hidden": 16, "proposals": 20, "anchor_sizes": [8, 16, 24, 32, 48]}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    running.SHARED = Shared()
    yield
    running.SHARED = Shared()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of each kind, and a classifier whose trunk is used."""
    folder = tmp_path_factory.mktemp("dense")
    write_masks(folder / "masks")
    write_boxes(folder / "boxes")
    save_trunk(folder / "trunk", seed=7)
    return folder


def save_trunk(folder: Path, seed: int) -> None:
    """A classifier whose attention is strong enough to matter."""
    torch.manual_seed(seed)
    model = timm.create_model(PLAIN, **TRUNK)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(20 if ".attn." in name else 1)
    linvit.save(model, folder)


def asked(place: Path, **changes: Any) -> Comparison:
    """A comparison of segmenters, of two plans and two seeds."""
    given: dict[str, Any] = {
        "plans": ("softmax", "stella"),
        "architecture": {**HEAD, "backbone": str(place / "trunk")},
        "data": str(place / "masks"),
        "settings": SHORT,
        "seeds": (0, 1),
        "size": (64,),
        "measure": Measure(size=()),
    }
    return Comparison(**{**given, **changes})


@pytest.fixture(scope="module")
def scratch(place: Path) -> Path:
    store = place / "scratch"
    summary = compare(asked(place, measure=Measure(size=(64,), batch=2, devices=("cpu",))), store)
    assert len(summary.done) == 6 and summary.complete
    return store


def test_every_candidate_starts_from_the_trunk(place: Path) -> None:
    jobs, _ = survey(asked(place))
    trunk = linvit.load(place / "trunk")
    wanted = {name: tensor for name, tensor in trunk.state_dict().items() if "mlp" in name}
    heads = []
    for job in jobs:
        assert job.places["backbone"] == str(place / "trunk")
        model = build_model(job.identity, seed=job.training.seed, trunk=running.SHARED.trunk(job))
        own = model.backbone.trunk.state_dict()
        assert wanted and all(torch.equal(own[name], tensor) for name, tensor in wanted.items())
        heads.append(model.head.classifier.weight)
    assert torch.equal(heads[0], heads[2]) and not torch.equal(heads[0], heads[1]), "a seed draws one head for all"


def test_a_key_knows_the_weights_and_not_where_they_lie(place: Path, tmp_path: Path) -> None:
    def keys(**changes: Any) -> set[str]:
        jobs, _ = survey(asked(place, plans=("softmax",), **changes))
        assert str(tmp_path) not in json.dumps(to_plain([job.identity for job in jobs]))
        return {job.key for job in jobs}

    first = keys()
    moved = str(shutil.copytree(place / "trunk", tmp_path / "moved"))
    data = shutil.copytree(place / "masks", tmp_path / "other")
    assert keys(architecture={**HEAD, "backbone": moved}, data=str(data)) == first
    save_trunk(tmp_path / "another", seed=8)
    assert not keys(architecture={**HEAD, "backbone": str(tmp_path / "another")}) & first
    (data / "images" / "training" / "0.png").write_bytes(b"another")
    assert not keys(data=str(data)) & first


def test_results(scratch: Path) -> None:
    runs, (first, *_) = runs_of(Store(scratch)), speeds_of(Store(scratch))
    assert len(runs) == 4
    for run in runs:
        found = run.accuracy
        assert found.metric == "mIoU" and set(found.metrics) == {"mIoU", "mAcc", "pAcc"}
        assert found.score == found.metrics["mIoU"] == pytest.approx(np.mean(list(found.per_class.values())))
        assert set(found.per_class) == set(NAMES) and 0 < found.score < found.metrics["pAcc"] <= 100
        assert [epoch.epoch for epoch in found.epochs] == [0, 0.5, 1]
        assert found.epochs[-1].score == found.score and found.best == max(epoch.score for epoch in found.epochs)
        assert found.score > found.epochs[0].score + 5, "it has learnt"
        assert run.right is None and not run.drift and run.model.counted is None
        assert run.model.tokens == 64 and run.model.macs > run.model.parameters
        assert (run.data.train, run.data.validation) == (12, 6)
    assert [(row.what, row.batch, row.size) for row in first.rows] == [
        ("inference", 1, 64), ("inference", 2, 64), ("training", 2, 64),
    ]  # fmt: skip
    assert all(row.median > 0 and row.ratio > 0 and row.tokens == 64 and not row.note for row in first.rows)


def test_paired_seeds(scratch: Path) -> None:
    """The difference to softmax is the mean over seeds with Student's interval; no more is claimed."""
    (setting,) = gather([scratch]).settings
    by_seed = {(run.label.candidate, run.seed): run.score for run in runs_of(Store(scratch))}
    apart = [by_seed["stella", seed] - by_seed["softmax", seed] for seed in (0, 1)]
    row = next(row for row in setting.rows if row.name == "stella")
    ends = stats.t.interval(0.95, 1, loc=np.mean(apart), scale=stats.sem(apart))
    assert row.delta.mean == pytest.approx(np.mean(apart)) and row.delta.interval == pytest.approx(ends)
    assert (row.delta.seeds, row.delta.images) == (2, 0)
    single = replace(setting.rows[0], runs=row.runs[:1])
    assert single.interval is None, "a single seed says nothing of others"


def test_report(scratch: Path) -> None:
    contents = gather([scratch])
    assert not contents.results.notes
    check_report(contents, "mIoU")
    text = markdown(contents)
    assert "| candidate | mIoU, % | Δ softmax, points | mAcc, % | pAcc, % | seeds |" in text
    assert "Student's t over these paired seeds" in text and "image by image. Its interval" not in text
    lines = [line for line in csv.DictReader(io.StringIO(spreadsheet(contents))) if line["kind"] == "run"]
    scores = {run.key: run.score for run in contents.results.runs}
    assert {line["key"]: float(line["mIoU"]) for line in lines} == scores
    assert all((line["metric"], line["top1"]) == ("mIoU", "") for line in lines)


def check_report(contents: Contents, metric: str) -> None:
    page, text = render(contents), markdown(contents)
    for written in (page, text):
        assert metric in written and "top-1" not in written.lower()
    assert any(metric in sentence for sentence in contents.answer.sentences)


def test_distilling(place: Path) -> None:
    """The teacher is trained first, and its score is what evaluating its folder gives."""
    stages = ("stages.align.epochs=1", "stages.maps.epochs=1", "stages.maps.fit=4", "batch_size=4", "precision=fp32")
    comparison = asked(place, mode="distil", settings=stages, teacher_settings=SHORT, seeds=(0,))
    store = Store(place / "distil")
    assert compare(comparison, store.folder).complete
    runs = {run.label.candidate: run for run in runs_of(store)}
    (taught,) = (result for result in store.results() if isinstance(result, Run) and result.kind == "teacher")
    folder = store.teacher_folder(taught.key)
    measured = linvit.evaluate(folder, place / "masks", batch=4, workers=0, device="cpu").metrics()
    assert taught.score == pytest.approx(100 * measured["mIoU"])
    for run in runs.values():
        assert run.identity.config["recipe"] == "fast" and run.conversion.agreement is None
        assert run.conversion.teacher_score == pytest.approx(taught.score)
        assert run.conversion.zero_shot == run.accuracy.epochs[0].score
    assert runs["softmax"].conversion.zero_shot == pytest.approx(taught.score), "softmax starts as its teacher"
    assert runs["stella"].conversion.report.startswith("plan stella: 2 of 2 layers changed")
    contents = gather([store.folder])
    check_report(contents, "mIoU")
    assert "zero-shot, % | seeds" in markdown(contents)
    given = asked(place, mode="distil", settings=stages, teacher=str(folder), architecture={"model": "fair"}, size=())
    (job, *_), _ = survey(replace(given, plans=("stella",), seeds=(0,)))
    assert (job.identity.head, job.identity.size, job.identity.classes) == ("semantic_fpn", 64, 3)
    again, before = (without_timings(run).accuracy for run in (execute(job, store, device="cpu"), runs["stella"]))
    assert again == before, "a teacher from a folder teaches the same"


def test_killed_and_resumed(place: Path, scratch: Path, tmp_path: Path) -> None:
    jobs, _ = survey(asked(place, settings=(*SHORT, "checkpoint_seconds=0")))
    job = jobs[3]  # the second seed
    alone = next(run for run in runs_of(Store(scratch)) if run.key == job.key)
    process = multiprocessing.get_context("spawn").Process(target=run_and_die, args=(job, tmp_path, 3))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    seen: list[dict[str, Any]] = []
    resumed = execute(job, Store(tmp_path), device="cpu", watch=seen.append)
    assert any("resumed after step" in record.get("text", "") for record in seen)
    assert without_timings(replace(resumed, identity=alone.identity)) == without_timings(alone)


def test_detectors(place: Path, tmp_path: Path) -> None:
    architecture = {"model": "faster_rcnn", "backbone": PLAIN, "backbone_args": TRUNK, **NARROW, **SMALL}
    comparison = asked(
        place, architecture=architecture, data=str(place / "boxes"), plans=("stella",), seeds=(0,),
        settings=(*SHORT, "eval_epochs=1"), measure=Measure(size=(64,), batch=1, devices=("cpu",)),
    )  # fmt: skip
    store = Store(tmp_path / "store")
    assert compare(comparison, store.folder).complete
    (run,), (speed,) = runs_of(store), speeds_of(store)
    assert run.accuracy.metric == "mAP" and {"AP50", "AP75"} <= set(run.accuracy.metrics)
    assert set(run.accuracy.per_class) == set(NAMES[1:]) and run.model.counted == "backbone"
    assert all(row.median > 0 for row in speed.rows)
    check_report(gather([store.folder]), "mAP")


def test_a_guess_where_batch_norm_wants_two_images(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the steps it is taken from are as small as they can be, and UPerNet refuses a single image."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(estimate, "STEP", 1.0)
    monkeypatch.setattr(estimate, "BUDGET", 0.01)
    head = {"model": "upernet", "channels": 16, "auxiliary_channels": 8, **NARROW}
    architecture = {**head, "backbone": PLAIN, "backbone_args": TRUNK}
    jobs, _ = survey(asked(place, architecture=architecture, plans=("softmax",), seeds=(0,)))
    assert estimate.calibrate(jobs[0].training, "cpu") > 0


def test_runs_that_share_a_gpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    assert shared.readers() == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    found = []
    for shared.sharing in (1, 2, 4, 8, 32):
        found.append(shared.readers())
    assert found == [8, 8, 4, 2, 1]


def test_a_training_step_with_masks_in_half_precision() -> None:
    """Made-up objects have masks where the model learns them."""
    model = timm.create_model("mask_rcnn", num_classes=3, backbone=PLAIN, backbone_args=TRUNK, **NARROW, **SMALL)
    step = training_pass(model, torch.randn(1, 3, 64, 64), "bf16")
    first = step()
    assert is_finite(first) and step() != first, "the weights have moved"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": HEAD}, "semantic_fpn wants a backbone"),
        ({"architecture": {**HEAD, "backbone": "vit_tiny"}}, "unknown backbone 'vit_tiny'"),
        ({"patch_size": (8,)}, "patch_size are of classifiers"),
        ({"recipe": "deit"}, "unknown recipe to segment 'deit'"),
        ({"architecture": {"model": "fair_pyramid_p4_sa", "backbone": "resnet18"}, "data": "digits", "recipe": "deit"},
         "has no backbone: give a head"),
        ({"mode": "distil", "teacher": "vit_tiny_patch16_224", "data": "digits"}, "is no semantic_fpn"),
    ],
)  # fmt: skip
def test_mistakes(place: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LinvitError, match=said):
        survey(asked(place, **changes))


def test_a_backbone_that_is_converted_or_gone(place: Path, tmp_path: Path) -> None:
    model = linvit.load(place / "trunk")
    linvit.convert(model, "stella")
    linvit.save(model, tmp_path / "converted")
    with pytest.raises(LinvitError, match=r"the backbone .* is converted already"):
        survey(asked(place, architecture={**HEAD, "backbone": str(tmp_path / "converted")}))
    (job, *_), _ = survey(asked(place))
    with pytest.raises(LinvitError, match="--backbone"):
        execute(replace(job, places={"data": str(place / "masks")}), Store(tmp_path), device="cpu")
