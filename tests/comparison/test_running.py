from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from linvit.codec import to_plain
from linvit.comparison.description.job import Job
from linvit.comparison.results import DataFacts, Named
from linvit.comparison.scheduling.execution import running
from linvit.comparison.scheduling.execution.running import execute, threads
from linvit.comparison.scheduling.execution.sharing import Shared
from linvit.comparison.scheduling.store import Store
from linvit.conversion import load
from linvit.errors import LinvitError
from linvit.training.config import Config
from linvit.training.engine.stopping import Stopped
from linvit.training.recipes import RECIPES, recipe
from tests.comparison.jobs import without_timings
from tests.comparison.small import PLAIN, jobs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test begins as a new process would."""
    running.SHARED = Shared()
    yield
    running.SHARED = Shared()


def dies_at(step: int) -> Callable[[dict[str, Any]], None]:
    def watch(record: dict[str, Any]) -> None:
        if record["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


def run_and_die(job: Job, folder: Path, step: int) -> None:
    execute(job, Store(folder), device="cpu", watch=dies_at(step))


def test_a_result_has_everything(tmp_path: Path) -> None:
    (job,) = jobs("stella", settings=("epochs=6",))
    seen: list[dict[str, Any]] = []
    result = execute(job, Store(tmp_path), device="cpu", shared=2, watch=seen.append)
    json.dumps(to_plain(result), allow_nan=False)
    assert (result.kind, result.key, result.label) == ("run", job.key, job.label)
    assert replace(result.data, digest="") == DataFacts("digits", "", 1437, 360)
    assert result.model.tokens == 16 and result.model.macs > result.model.parameters > 1000
    found = result.accuracy
    assert [epoch.epoch for epoch in found.epochs] == [0, 1, 2, 3, 4, 5, 6]
    assert found.score == found.epochs[-1].score > found.epochs[0].score + 30, "it has learnt"
    assert found.loss == pytest.approx(found.epochs[-1].loss) and found.loss < found.epochs[0].loss
    correct = np.unpackbits(np.frombuffer(base64.b64decode(found.correct), np.uint8), count=360)
    assert 100 * correct.mean() == pytest.approx(found.score)
    assert found.standard_error == pytest.approx((found.score * (100 - found.score) / 360) ** 0.5)
    assert found.best == max(epoch.score for epoch in found.epochs)
    training = result.training
    assert training.images_per_second > 0 and training.seconds > 0
    assert (training.peak_bytes, training.device, training.shared) == (None, "cpu", 2)
    assert [row.dtype for row in result.drift] == ["float16", "bfloat16"]
    for row in result.drift:
        assert row.finite and 0 < row.relative_rms < 0.1 and row.agreement > 95
    assert torch.__version__.startswith(result.environment.packages["torch"])
    assert result.conversion is None
    assert {record["kind"] for record in seen} == {"train", "eval"}


def test_the_same_result_whatever_ran_before(tmp_path: Path) -> None:
    """Alone, after another seed that left its model and its augmenter, and from a process that was killed."""
    first, second = jobs("castling", seeds=[0, 1], settings=("checkpoint_seconds=0", "ema=0.5", "drop_path=0.1"))
    alone = without_timings(execute(second, Store(tmp_path / "a"), device="cpu"))
    running.SHARED = Shared()
    other = without_timings(execute(first, Store(tmp_path / "b"), device="cpu"))
    bench = running.SHARED.bench
    again = without_timings(execute(second, Store(tmp_path / "b"), device="cpu"))
    assert running.SHARED.bench is bench, "the second seed used the first one's model"
    assert again == alone
    assert other.accuracy != alone.accuracy, "seeds differ"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_and_die, args=(second, tmp_path / "c", 5))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store = Store(tmp_path / "c")
    assert list((store.work_folder(second.key) / "checkpoints").iterdir()), "it left something to go on from"
    seen: list[dict[str, Any]] = []
    resumed = execute(second, store, device="cpu", watch=seen.append)
    assert any("resumed after step" in record.get("text", "") for record in seen)
    assert without_timings(resumed) == alone
    late = execute(second, store, device="cpu")  # killed after the last step, before the result was written
    assert without_timings(late) == alone


def test_told_to_stop_it_leaves_what_it_has(tmp_path: Path) -> None:
    """However long ago the last checkpoint was: workers are told by SIGTERM when a comparison is stopped."""
    (job,) = jobs("stella", settings=("checkpoint_seconds=1000", "log_steps=1"))
    store = Store(tmp_path)

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(Stopped):
        execute(job, store, device="cpu", watch=stop)
    running.SHARED = Shared()
    seen: list[dict[str, Any]] = []
    resumed = execute(job, store, device="cpu", watch=seen.append)
    assert any("resumed after step 3" in record.get("text", "") for record in seen)
    assert without_timings(resumed) == without_timings(execute(job, Store(tmp_path / "whole"), device="cpu"))


def test_a_second_seed_of_a_drop_path_that_grows(tmp_path: Path) -> None:
    """What a training adds to a model to know how far it is, is no weight of the next seed's."""
    grows = ("drop_path=0.1", "drop_path_rule=ramped")
    first, second = jobs("stella", seeds=[0, 1], settings=grows)
    alone = without_timings(execute(second, Store(tmp_path / "a"), device="cpu"))
    running.SHARED = Shared()
    execute(first, Store(tmp_path / "b"), device="cpu")
    assert without_timings(execute(second, Store(tmp_path / "b"), device="cpu")) == alone


def test_threads_do_not_change_a_result(tmp_path: Path) -> None:
    (job,) = jobs("stella")
    results = []
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(without_timings(execute(job, Store(tmp_path / str(count)), device="cpu")))
        assert torch.get_num_threads() == count, "the process keeps its own number"
    torch.set_num_threads(before)
    assert results[0] == results[1]
    assert threads(1e6) == 1 and threads() == min(running.THREADS, os.cpu_count() or 1)


def test_distilling(tmp_path: Path) -> None:
    """The teacher first, then candidates made from it and taught by it, one with measured layers."""
    settings = ("epochs=3", "batch_size=256", "precision=fp32", "stages.features.fit=256", "eval_epochs=1")
    teacher, *runs = jobs(
        "relu_linear", "mixa:keep=1,layers=measured", "softmax", mode="distil", recipe="fast", plain=False,
        settings=settings, teacher_settings=[*PLAIN, "epochs=3"],
    )  # fmt: skip
    store = Store(tmp_path)
    with pytest.raises(LinvitError, match=f"the weights of teacher {teacher.key} are not in the store"):
        execute(runs[0], store, device="cpu")
    taught = execute(teacher, store, device="cpu")
    assert taught.kind == "teacher" and load(store.teacher_folder(teacher.key)).num_classes == 10
    linear, mixed, softmax = (execute(job, store, device="cpu") for job in runs)
    for result in (linear, mixed, softmax):
        found = result.conversion
        assert found.teacher_score == pytest.approx(taught.score)
        assert found.zero_shot == result.accuracy.epochs[0].score
        assert 0 <= found.agreement <= 100 and found.kl >= 0
    assert softmax.conversion.zero_shot == taught.score, "softmax starts as its teacher"
    assert linear.conversion.report == "plan relu_linear: 2 of 2 layers changed, 0 new parameters"
    assert len(mixed.conversion.layers) == 1 and linear.conversion.layers is None
    folder = store.teacher_folder(teacher.key).rename(tmp_path / "given")
    given = {"mode": "distil", "recipe": "fast", "plain": False, "settings": settings, "teacher": str(folder)}
    (job,) = jobs("relu_linear", **given, patch_size=[], size=[])
    same = execute(job, store, device="cpu")
    assert same.accuracy.correct == linear.accuracy.correct, "a teacher from a folder teaches the same"
    (finer,) = jobs("relu_linear", **given, patch_size=[4])
    with pytest.raises(LinvitError, match="recipe fast aligns layers, and the teacher has patches of 8"):
        execute(finer, store, device="cpu")
    (folder / "model.safetensors").write_bytes(b"another")
    running.SHARED = Shared()
    with pytest.raises(LinvitError, match="given is not the teacher this run is about"):
        execute(job, store, device="cpu")


def test_failures_say_what_is_wrong(tmp_path: Path) -> None:
    (job,) = jobs("stella")
    (measured,) = jobs("mixa:keep=1,layers=measured")
    store = Store(tmp_path)
    with pytest.raises(LinvitError, match="layers=measured asks a trained model"):
        execute(measured, store, device="cpu")
    other = replace(job, identity=replace(job.identity, data=Named("digits", "0")))
    with pytest.raises(LinvitError, match="is not the set this run is about"):
        execute(other, store, device="cpu")
    assert running.SHARED.bench is None, "nothing of a failed run is used again"


def test_work_that_is_not_ours_is_begun_again(tmp_path: Path) -> None:
    job, odd = jobs("stella", seeds=[0, 1], settings=("epochs=1", "checkpoint_seconds=0"))
    store = Store(tmp_path)
    execute(odd, store, device="cpu")
    store.work_folder(odd.key).rename(store.work_folder(job.key))
    result = execute(job, store, device="cpu")
    assert without_timings(result) == without_timings(execute(job, Store(tmp_path / "b"), device="cpu"))


@pytest.fixture
def dynamo_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler without its backend, which stops instead of giving up when it compiles one function too often."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: compile_(f, backend="eager", **options))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_a_second_seed_compiles_nothing(tmp_path: Path, dynamo_only: None) -> None:
    settings = ("compile=default", "ema=0.5", "drop_path=0.1", "mixup=0.5", "randaugment=rand-m9")
    first, second, third = jobs("castling", seeds=[0, 1, 2], settings=settings)
    before = graphs()
    execute(first, Store(tmp_path), device="cpu")
    assert graphs() == before + 2, "the step and the augmentation"
    execute(second, Store(tmp_path), device="cpu")
    result = execute(third, Store(tmp_path), device="cpu")
    assert graphs() == before + 2
    running.SHARED = Shared()
    assert without_timings(execute(third, Store(tmp_path / "b"), device="cpu")) == without_timings(result)


def test_all_stages_of_a_distillation_compile_once(tmp_path: Path, dynamo_only: None) -> None:
    settings = ("epochs=3", "batch_size=256", "precision=fp32", "compile=default", "stages.features.fit=256")
    teacher, first, second = jobs(
        "stella", mode="distil", recipe="fast", plain=False, settings=settings, seeds=[0, 1],
        teacher_settings=[*PLAIN, "epochs=1", "compile=off"],
    )  # fmt: skip
    store = Store(tmp_path)
    execute(teacher, store, device="cpu")
    before = graphs()
    execute(first, store, device="cpu")
    once = graphs()
    assert once > before + 2
    execute(second, store, device="cpu")
    assert graphs() == once


def test_many_candidates_are_all_compiled(tmp_path: Path, dynamo_only: None) -> None:
    """More than the compiler takes before it gives up on a function."""
    store = Store(tmp_path)
    with torch._dynamo.config.patch(recompile_limit=2):
        for job in jobs("stella", "sima", "hydra", settings=("compile=default", "epochs=0.4")):
            before = graphs()
            execute(job, store, device="cpu")
            assert graphs() > before, "compiled, not left as it was"


def test_affinity_is_what_seeds_share() -> None:
    a, b, c = (jobs(name, seeds=seeds) for name, seeds in (("stella", [0]), ("stella", [1]), ("sima", [0])))
    assert a[0].affinity == b[0].affinity != c[0].affinity


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_come_back_from_plain_data(name: str) -> None:
    config = recipe(name)
    assert Config.from_dict(json.loads(json.dumps(to_plain(config)))) == config
    assert Config.from_dict({**to_plain(config), "sparse_empty": 1e-3}) == config, "a field that is gone"
    with pytest.raises(LinvitError, match="unknown field of the recipe 'lrr'"):
        Config.from_dict({"lrr": 1})
