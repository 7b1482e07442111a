"""The store under many writers, after kill -9, and with damaged files."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import linvit
from linvit.comparison.description.spec import Comparison, load
from linvit.comparison.scheduling import store as claims
from linvit.comparison.scheduling.places.place import Here
from linvit.comparison.scheduling.scheduler import run
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from tests.comparison.jobs import log, make_job, make_result, quick, runs_of, speeds_of

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


def test_a_result_is_written_once_and_never_changed(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)
    assert not store.finished(job) and store.result(job) is None
    store.work_folder(job.key).mkdir(parents=True)
    assert store.write(job, make_result(job, top1=1.0))
    assert store.finished(job) and not store.work_folder(job.key).exists()
    assert not store.write(job, make_result(job, top1=2.0))
    assert [result.score for result in runs_of(store)] == [1.0]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"{job.key}.json"]
    with pytest.raises(ValueError, match="the result of run"):
        store.write(make_job(2), make_result(job))


def test_speeds_are_kept_for_each_hardware(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1, "speed")
    assert store.write(job, make_result(job, hardware="NVIDIA H200"))
    assert not store.finished(job) and store.finished(job, "NVIDIA H200")
    assert store.write(job, make_result(job)) and store.finished(job)
    assert {path.name for path in (tmp_path / "speeds").iterdir()} >= {f"{job.key}-nvidia-h200.json"}
    assert len(speeds_of(store)) == 2 and not runs_of(store)


def test_failures_add_up(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)
    try:
        raise RuntimeError("CUDA out of memory\nmore")
    except RuntimeError as error:
        store.add_failure(store.failure(job, error))
    store.add_failure(store.failure(job, LinvitError("give a larger GPU")))
    first, second = store.failures(job.key)
    assert first.error == "RuntimeError: CUDA out of memory" and "Traceback" in first.traceback
    assert (first.attempt, second.attempt, second.error) == (1, 2, "give a larger GPU")
    assert not store.finished(job) and len(store.failures()) == 2


def test_a_failure_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    store, job = Store(tmp_path / "store"), make_job(1)
    try:
        linvit.create_attention("nothing")
    except LinvitError as error:
        cut = LinvitError(f"the checkpoint {store.folder / 'work' / 'a.safetensors'} is cut short")
        failed, traced = store.failure(job, cut), store.failure(job, error)
    assert failed.error == "the checkpoint work/a.safetensors is cut short"
    assert f'"{Path("linvit", "attention")}' in traced.traceback
    assert str(Path(linvit.__file__).parents[1]) not in traced.traceback


def test_a_relative_store_is_not_taken_for_the_end_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(Path("a"))
    text = f"data/photos, {tmp_path / 'a' / 'work' / 'x.safetensors'}, a/runs and ../a/runs"
    assert store.portable(text) == "data/photos, work/x.safetensors, runs and ../a/runs"


def test_damaged_and_foreign_files_are_noted(tmp_path: Path) -> None:
    store, job, cut = Store(tmp_path), make_job(1), make_job(2)
    store.write(job, make_result(job))
    whole = (tmp_path / "runs" / f"{job.key}.json").read_text()
    (tmp_path / "runs" / f"{cut.key}.json").write_text(whole[:50])
    (tmp_path / "runs" / "notes.json").write_text("[1]")
    (tmp_path / "runs" / f"{make_job(3).key}.json").write_text(whole)  # a result under another's name
    assert [result.key for result in runs_of(store)] == [job.key]
    assert len(store.notes) == 3 and all("left aside" in note for note in store.notes)
    assert store.write(cut, make_result(cut)) and store.finished(cut)
    assert any("damaged" in path.name for path in (tmp_path / "runs").iterdir())


def test_what_was_asked_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for comparison in (load("digits"), Comparison(plans=("stella",)), load("digits")):
        store.ask(comparison)
    assert len(store.comparisons()) == 2 and load("digits") in store.comparisons()
    (tmp_path / "comparisons" / "x.json").write_text('{"time": "", "comparison": {"sedes": 1}}')
    assert len(store.comparisons()) == 2 and "no comparison" in store.notes[0]
    with pytest.raises(LinvitError, match="is a file"):
        Store(tmp_path / "comparisons" / "x.json")


# Claims.


def test_one_claim_at_a_time(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)
    first = store.claim(job)
    assert first is not None and store.claim(job) is None and store.claimed(job)
    first.release()
    assert not store.claimed(job)
    again = store.claim(job)
    assert again is not None
    store.write(job, make_result(job))
    again.release()
    assert store.claim(job) is None, "finished"
    assert not [path for path in (tmp_path / "claims").iterdir() if not path.name.startswith(".")]


def hold(folder: str, number: int, pipe: Any) -> None:
    claim = Store(folder).claim(make_job(number))
    pipe.send(claim is not None)
    time.sleep(60)


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    ours, theirs = fork.Pipe()
    process = fork.Process(target=hold, args=(str(tmp_path), 1, theirs))
    process.start()
    assert ours.recv() is True
    store, job = Store(tmp_path), make_job(1)
    assert store.claimed(job) and store.claim(job) is None
    os.kill(process.pid, signal.SIGKILL)  # not waited for: a zombie is dead too
    until = time.monotonic() + 10
    while (claim := store.claim(job)) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert claim is not None
    claim.release()
    process.join()


def test_a_number_used_again_is_another_process(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)
    claim = store.claim(job)
    assert claim is not None
    held = json.loads(claim.path.read_text())
    claim.path.write_text(json.dumps({**held, "started": held["started"] - 1}))
    taken = store.claim(job)
    assert taken is not None
    taken.release()


def test_another_machine_is_believed_while_it_beats(tmp_path: Path) -> None:
    store, job = Store(tmp_path, beat=0.02, stale=0.4), make_job(1)
    claim = store.claim(job)
    assert claim is not None
    held = json.loads(claim.path.read_text())
    claim.path.write_text(json.dumps({**held, "host": "elsewhere"}))
    time.sleep(0.6)
    assert store.claim(job) is None, "its heart beats"
    claim._ended.set()
    claim._thread.join()
    time.sleep(0.6)
    taken = store.claim(job)
    assert taken is not None and not store.path(job).exists()
    claim.release()
    assert store.claimed(job), "the old holder cannot give back what it lost"
    taken.release()


def test_a_sleeper_notices_that_it_lost(tmp_path: Path) -> None:
    claim = claims.take(tmp_path / "claims" / "x", beat=0.02)
    assert claim is not None
    claim.check()
    claim.path.write_text(json.dumps({"token": "another"}))
    until = time.monotonic() + 10
    while not claim.lost and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(claims.ClaimLost):
        claim.check()
    claim.release()
    assert claim.path.exists()


def test_a_half_written_claim_is_nobodys_after_a_while(tmp_path: Path) -> None:
    store, job = Store(tmp_path, stale=0.3), make_job(1)
    path = tmp_path / "claims" / job.key
    path.parent.mkdir()
    path.touch()
    assert store.claim(job) is None
    time.sleep(0.5)
    claim = store.claim(job)
    assert claim is not None
    claim.release()


# Many processes.


def contend(folder: str, count: int) -> None:
    store = Store(folder)
    jobs = [make_job(number, seconds=0.01) for number in range(count)]
    random.Random(os.getpid()).shuffle(jobs)
    run(jobs, store, Here(quick), watch=lambda *_: None)


@pytest.mark.parametrize("kills", [0, 12])
def test_many_processes_on_one_store(tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes fight over the same jobs and some are killed at random: nothing is lost and nothing doubled."""
    monkeypatch.setattr("linvit.comparison.scheduling.scheduler.POLL", 0.02)
    count = 60 + 10 * kills  # a kill hits nobody when all the work is done
    jobs = [make_job(number, seconds=0.01) for number in range(count)]
    workers = [fork.Process(target=contend, args=(str(tmp_path), count)) for _ in range(4)]
    for worker in workers:
        worker.start()
    chance, hits = random.Random(kills), 0
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 0.06))
        victim = chance.randrange(len(workers))
        workers[victim].kill()
        workers[victim].join()
        hits += workers[victim].exitcode == -signal.SIGKILL
        workers[victim] = fork.Process(target=contend, args=(str(tmp_path), count))
        workers[victim].start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store = Store(tmp_path)
    assert sorted(result.key for result in runs_of(store)) == sorted(job.key for job in jobs)
    assert not store.notes and not store.failures()
    begun = Counter(key for what, key, *_ in log(tmp_path) if what == "begin")
    assert set(begun) == {job.key for job in jobs}
    assert hits >= kills // 2 and sum(begun.values()) <= count + hits, "only what was killed is done again"
    assert not any(store.claimed(job) for job in jobs)
    overlaps(log(tmp_path))


def overlaps(lines: list[list[str]]) -> None:
    """No two processes are at one job at the same time: who begins does so after the one before has ended or died."""
    last: dict[str, str] = {}
    for what, key, pid, _ in lines:
        if what == "end":
            assert last[key] == pid, "another began before this one ended"
        else:
            last[key] = pid


def race(folder: str, number: int, barrier: Any, results: Any) -> None:
    store, job = Store(folder), make_job(number)
    barrier.wait()
    results.put(store.write(job, make_result(job, top1=float(os.getpid()))))


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    barrier, results = fork.Barrier(6), fork.Queue()
    workers = [fork.Process(target=race, args=(str(tmp_path), 1, barrier, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    assert sorted(results.get(timeout=20) for _ in workers) == [False] * 5 + [True]
    for worker in workers:
        worker.join()
    assert len(list((tmp_path / "runs").iterdir())) == 1
