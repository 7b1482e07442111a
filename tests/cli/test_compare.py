"""`linvit compare` as a user sees it: grid, run, repeat, travel, and every mistake in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Outcome

TINY = (
    *("--model", "fair", "--model-arg", "width=8", "--model-arg", "depths=[1]", "--model-arg", "heads=[1]"),
    *("--patch-size", "8", "--size", "32", "--recipe", "deit", "--data", "digits"),
    *("--set", "epochs=1", "--set", "warmup_epochs=0", "--set", "batch_size=512", "--set", "precision=fp32"),
    *("--set", "ema=none", "--set", "randaugment=none", "--set", "lr_batch=none"),
)
FILE = """
data = "digits"
settings = ["epochs=1", "warmup_epochs=0", "batch_size=512", "precision=fp32", "ema=none", "randaugment=none"]
plans = ["softmax", "stella"]
seeds = [0, 1]
patch_size = [8]
size = [32]
[architecture]
model = "fair"
width = 8
depths = [1]
heads = [1]
[measure]
size = [32]
batch = 2
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(FILE)
    return str(tmp_path / "tiny.toml")


def test_a_comparison_from_end_to_end(linvit: Callable[..., Outcome], tiny: str, tmp_path: Path) -> None:
    store, other = str(tmp_path / "store"), str(tmp_path / "other")
    grid = linvit("compare", tiny, "-o", store, "--dry-run", "--json").json
    assert (grid["runs"], grid["left"], len(grid["timings"])) == (4, 4, 2)
    assert grid["seconds"] > 0 and "few training steps" in grid["estimated"]
    softmax, stella = grid["rows"]
    assert softmax["macs"] > stella["macs"] and softmax["parameters"] == stella["parameters"]
    assert not Path(store).exists(), "a dry run writes nothing"

    first = linvit("compare", tiny, "-o", store, "--only", grid["rows"][0]["runs"][0]["key"], "--json")
    assert first.code == 0 and len(first.json["done"]) == 1
    shown = linvit("compare", "-o", store)
    assert shown.code == 0, shown.err
    assert "softmax" in shown.out and "6 result files" in shown.out and "[6/6]" in shown.err
    page = Path(store, "report.html")
    assert f"Report: {page}" in shown.out and page.read_text().startswith("<!doctype html>")
    over = linvit("compare", tiny, "-o", store, "--dry-run", "--json").json
    assert over["left"] == 0 and [timing["finished"] for timing in over["timings"]] == [True, True]
    assert not any(timing["finished"] for timing in grid["timings"])
    again = linvit("compare", "-o", store, "--json").json
    assert not again["done"] and len(again["earlier"]) == 6 and not again["failed"]
    assert again["report"] == str(page)
    rows = {row["candidate"]: row for row in again["rows"]}
    assert rows["stella"]["seeds"] == [0, 1] and rows["stella"]["milliseconds"] > 0
    assert rows["stella"]["difference"] == pytest.approx(rows["stella"]["top1"] - rows["softmax"]["top1"])

    grid = linvit("compare", "-o", store, "--dry-run", "--json").json
    assert grid["left"] == 0 and "4 finished runs" in grid["estimated"]

    packed = linvit("compare", "-o", store, "--pack", str(tmp_path / "store.tar"))
    assert packed.code == 0 and "7 files" in packed.out
    merged = linvit("compare", "-o", other, "--merge", str(tmp_path / "store.tar"))
    assert merged.code == 0 and "4 runs, 2 speeds, 1 comparison new" in merged.out
    assert not linvit("compare", "-o", other, "--json").json["done"], "what came along is finished"

    key = stella["runs"][1]["key"]
    result = Path(store, "runs", f"{key}.json")
    told = json.loads(result.read_text())
    assert told["command"] == f"linvit compare {key}.json -o again"
    repeated = linvit("compare", str(result), "-o", str(tmp_path / "again"), "--json").json
    assert repeated["done"] == [key]
    twice = json.loads(Path(tmp_path, "again", "runs", f"{key}.json").read_text())
    assert twice["accuracy"]["correct"] == told["accuracy"]["correct"] and twice["identity"] == told["identity"]


def test_killed_and_resumed_on_another_machine(linvit: Callable[..., Outcome], tiny: str, tmp_path: Path) -> None:
    """kill -9 in the middle of a training; its checkpoint travels in the archive, and the end is bit for bit that of a
    run that was never killed."""
    Path(tiny).write_text(FILE.replace("size = [32]\nbatch", "size = []\nbatch"))
    settings = ("epochs=10", "batch_size=64", "checkpoint_seconds=0.2", "eval_epochs=5", "mixup=0", "cutmix=0")
    change = ("--plan", "stella", "--seeds", "0", *(part for text in settings for part in ("--set", text)))
    here, there, whole = (tmp_path / name for name in ("here", "there", "whole"))
    command = [sys.executable, "-m", "linvit", "compare", tiny, "-o", str(here), *change]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while not list(here.glob("work/*/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert list(here.glob("claims/*")) and not list(here.glob("runs/*")), "killed on the way"
    linvit("compare", "-o", str(here), "--pack", str(tmp_path / "half.tar"))
    assert "1 work" in linvit("compare", "-o", str(there), "--merge", str(tmp_path / "half.tar")).out
    resumed = linvit("compare", "-o", str(there))
    assert resumed.code == 0 and "resumed after step" in resumed.err
    assert not list(there.glob("work/*"))
    assert linvit("compare", tiny, "-o", str(whole), *change).code == 0
    found, wanted = (json.loads(next(folder.glob("runs/*")).read_text()) for folder in (there, whole))
    assert found["key"] == wanted["key"]
    for name in ("top1", "loss", "correct"):
        assert found["accuracy"][name] == wanted["accuracy"][name]


def test_flags_alone_and_a_failed_run(
    linvit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linvit.comparison.scheduling.execution import running

    real, wrong = running.execute, ["stella"]

    def execute(job: Any, store: Any, **options: Any) -> dict[str, Any]:
        if job.label.candidate in wrong:
            raise RuntimeError("no luck today")
        return real(job, store, **options)

    monkeypatch.setattr(running, "execute", execute)
    arguments = ("compare", *TINY, "--plan", "softmax,stella", "-o", str(tmp_path))
    outcome = linvit(*arguments)
    assert outcome.code == 1
    assert "failed: stella patch 8 32 px seed 0: RuntimeError: no luck today" in outcome.out
    assert f"linvit compare -o {tmp_path} --retry tries them again" in outcome.out
    failed = linvit("compare", "-o", str(tmp_path), "--json")
    assert failed.code == 1 and [row["error"] for row in failed.json["failed"]] == ["RuntimeError: no luck today"] * 2
    wrong.clear()
    assert linvit("compare", "-o", str(tmp_path)).code == 1, "what failed is left alone"
    assert linvit("compare", "-o", str(tmp_path), "--retry", "--json").code == 0


def test_ctrl_c(linvit: Callable[..., Outcome], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linvit.comparison.scheduling.execution import running

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "execute", interrupt)
    outcome = linvit("compare", tiny, "-o", str(tmp_path / "s"), "--pack", str(tmp_path / "s.tar"))
    assert outcome.code == 130 and "stopped: 0 of 6 jobs are finished, the same command goes on" in outcome.err
    assert (tmp_path / "s.tar").exists(), "packed all the same"


def test_presets_are_shown(linvit: Callable[..., Outcome]) -> None:
    assert "imagenette" in linvit("compare", "--show").out.split()
    text = linvit("compare", "--show", "digits").out
    assert text.startswith("#") and 'data = "digits"' in text
    assert linvit("compare", "digits", "--show", "--json").json["data"] == "digits"


def test_the_grid_in_words(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("compare", "paper", "--plan", "softmax,stella,xca:lpi=true,variant=fair", "--dry-run")
    assert outcome.code == 0
    assert "6 runs, 6 of them left" in outcome.out and "not known without the data (imagenet)" in outcome.out
    assert "28.27" in outcome.out and "8,803" in outcome.out, "the paper's parameters, and MACs without norms"
    assert outcome.out.count("xca:lpi=true,variant=fair") == 2, "at both patch sizes"


def test_flags_hold_in_all_parts(linvit: Callable[..., Outcome], tiny: str) -> None:
    Path(tiny).write_text(FILE + '[[also]]\npatch_size = [4]\nseeds = [5]\nplans = ["qt"]\n')
    counts = lambda *flags: linvit("compare", tiny, *flags, "--dry-run", "--json").json["runs"]  # noqa: E731
    assert counts() == 2 * 2 + 1
    assert counts("--plan", "stella") == 2 + 1
    assert counts("--patch-size", "8", "--seeds", "0") == 2 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit",), "unknown preset 'digit'; did you mean digits"),
        (("digits", "--plan", "softmax,stela"), "did you mean stella"),
        (("digits", "--set", "epoch=1"), "did you mean epochs"),
        (("digits", "--seeds", "a"), "expected whole numbers"),
        (("digits", "--engine", "gpu"), "did you mean gpus"),
        (("digits", "--engine", "local", "--per-gpu", "2"), "--per-gpu is for workers"),
        (("digits", "--engine", "gpus", "--address", "x"), "Ray cluster"),
        (("digits", "--model-arg", "width=3"), "give --model too"),
        (("digits", "--only", "zz"), "no job has the key zz"),
        (("imagenette",), "no data at imagenette128.tar"),
        (("digits", "--teacher", "x"), "mode"),
        ((), "say what to compare"),
        (("nowhere.json",), "cannot read nowhere.json"),
        (("--merge", "nowhere.tar"), "no store at nowhere.tar"),
    ],
)
def test_mistakes(linvit: Callable[..., Outcome], tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    outcome = linvit("compare", *arguments, "-o", str(tmp_path / "store"))
    assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
    assert not (tmp_path / "store" / "runs").exists()


def test_where_results_go_must_be_said(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("compare", "digits")
    assert outcome.code == 2 and "-o runs/digits" in outcome.err


def test_the_bars_at_a_terminal(tmp_path: Path) -> None:
    """Whatever order engines tell things in."""
    import io

    from rich.console import Console

    from linvit.cli.compare_output import bars
    from linvit.cli.output import live
    from linvit.comparison.scheduling.store import Store
    from tests.comparison.jobs import make_job, make_result

    store, jobs = Store(tmp_path), [make_job(1), make_job(2), make_job(3, "speed")]
    screen = io.StringIO()
    train = {"kind": "train", "step": 5, "steps": 10, "stage": "train", "loss": 1.0, "images_per_second": None}
    with live(Console(file=screen, force_terminal=True, width=100, highlight=False)) as shown:
        watch = bars(jobs, store, shown)
        for record in ({"kind": "start"}, train, {"kind": "lost", "text": "killed [-9]"}, train):
            watch(jobs[0], record)
        watch(jobs[0], {"kind": "eval", "epoch": 3.0, "top1": 51.234})
        watch(jobs[1], {"kind": "failed", "error": "no [luck]"})
        watch(jobs[2], {"kind": "start"})
        watch(jobs[2], {"kind": "speed", "size": 32})
        store.write(jobs[0], make_result(jobs[0], top1=60.0, seconds=100.0))
        watch(jobs[0], {"kind": "done"})
    text = screen.getvalue()
    for words in ("c1 patch 4 32 px seed 1: lost: killed [-9]", "failed: no [luck]", "top-1 60.00, 2 min", "1 of 3"):
        assert words in text
