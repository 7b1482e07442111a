"""The scheduler in this process and with workers: failures, lost workers, teachers first, speeds alone at the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from linvit.comparison.description.job import Job
from linvit.comparison.results import Run, Speed
from linvit.comparison.scheduling.places.gpus import Gpus
from linvit.comparison.scheduling.places.place import Here
from linvit.comparison.scheduling.scheduler import Board, run
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError, Unwritable
from tests.comparison.jobs import log, make_job, make_result, quick, runs_of, speeds_of

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # of linvit and of the tests, for other processes


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, job: Job, record: dict[str, Any]) -> None:
        self.events.append((job.label.candidate, record["kind"]))

    def of(self, name: str) -> list[str]:
        return [kind for candidate, kind in self.events if candidate == name]


def test_local_does_everything_once(tmp_path: Path) -> None:
    store, heard = Store(tmp_path), Heard()
    jobs = [make_job(0, "speed"), *(make_job(number) for number in range(1, 4))]
    summary = run(jobs, store, Here(quick), watch=heard)
    assert summary.complete and set(summary.done) == {job.key for job in jobs}
    assert heard.of("c1") == ["start", "train", "done"]
    begun = [key for what, key, *_ in log(tmp_path) if what == "begin"]
    assert begun == [job.key for job in (*jobs[1:], jobs[0])], "runs first, speeds at the end"
    again = run(jobs, store, Here(quick), watch=heard)
    assert not again.done and len(again.earlier) == 4 and len(log(tmp_path)) == 8


def test_a_failure_is_recorded_and_stops_nobody(tmp_path: Path) -> None:
    store, heard = Store(tmp_path), Heard()
    jobs = [make_job(1, error="out of luck"), make_job(2)]
    summary = run(jobs, store, Here(quick), watch=heard)
    assert summary.failed == (jobs[0].key,) and summary.done == (jobs[1].key,) and not summary.complete
    assert store.failures(jobs[0].key)[0].error == "RuntimeError: out of luck"
    assert heard.of("c1")[-1] == "failed"
    assert run(jobs, store, Here(quick), watch=heard).failed == (jobs[0].key,)
    assert len(store.failures(jobs[0].key)) == 1, "not tried again unless asked"
    run(jobs, store, Here(quick), watch=heard, retry=True)
    assert len(store.failures(jobs[0].key)) == 2


def test_who_learns_from_a_failed_teacher_is_missing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bad, good = make_job(1, "teacher", error="no"), make_job(2, "teacher")
    pupils = [make_job(3, needs=(bad.key,)), make_job(4, needs=(good.key,)), make_job(5, needs=("0" * 16,))]
    summary = run([*pupils, bad, good], store, Here(quick), watch=Heard())
    assert summary.failed == (bad.key,) and summary.missing == (pupils[0].key, pupils[2].key)
    assert set(summary.done) == {good.key, pupils[1].key}


def test_ctrl_c_gives_the_claim_back(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)

    def interrupt(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([job], store, Here(interrupt), watch=Heard())
    assert not store.claimed(job) and not store.failures(job.key)
    assert run([job], store, Here(quick), watch=Heard()).complete


def test_a_result_that_does_not_count_is_not_tried_for_ever(tmp_path: Path) -> None:
    """A worker with other hardware than it says would else be asked again and again."""
    store, job = Store(tmp_path), make_job(1, "speed")

    assert run([job], store, Here(odd), watch=Heard()).missing == (job.key,)
    other = make_job(2, "speed")
    assert run([other], store, Gpus(odd), watch=Heard()).missing == (other.key,)


def odd(job: Job, *_: Any, **__: Any) -> Run | Speed:
    return make_result(job, hardware="another")


def hold(folder: str, pipe: Any) -> None:
    claim = Store(folder).claim(make_job(2))
    pipe.send("held" if claim is not None else "no")
    time.sleep(60)


def test_waits_for_what_others_do_and_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linvit.comparison.scheduling.scheduler.POLL", 0.05)
    store, mine, theirs = Store(tmp_path), make_job(1), make_job(2)
    ours, pipe = FORK.Pipe()
    other = FORK.Process(target=hold, args=(str(tmp_path), pipe))
    other.start()
    assert ours.recv() == "held"
    heard = Heard()

    def kill_then(job: Job, record: dict[str, Any]) -> None:
        heard(job, record)
        if (job.key, record["kind"]) == (mine.key, "done"):
            other.kill()
            other.join()

    summary = run([theirs, mine], store, Here(quick), watch=kill_then)
    assert summary.complete and [name for name, kind in heard.events if kind == "done"] == ["c1", "c2"]


def test_workers_share_the_jobs_and_speeds_come_alone(tmp_path: Path) -> None:
    store, heard = Store(tmp_path), Heard()
    teacher = make_job(0, "teacher", seconds=0.2)
    runs = [make_job(n, needs=(teacher.key,), meet=n < 3) for n in range(1, 5)]
    odd = [make_job(5, error="no luck"), make_job(6, deaths=1), make_job(7, deaths=9)]
    speeds = [make_job(n, "speed", seconds=0.1) for n in (8, 9)]
    jobs = [teacher, *runs, *odd, *speeds]
    summary = run(jobs, store, Gpus(quick, per_gpu=2), watch=heard)
    assert summary.failed == (odd[0].key, odd[2].key) and not summary.missing
    assert set(summary.done) == {job.key for job in (teacher, *runs, odd[1], *speeds)}
    assert heard.of("c6").count("lost") == 1 and heard.of("c6")[-1] == "done"
    assert heard.of("c7").count("lost") == 3 and heard.of("c7")[-1] == "failed"
    assert "code -9" in store.failures(odd[2].key)[0].error
    lines = log(tmp_path)
    assert len({pid for what, key, pid, _ in lines if key in {run.key for run in runs[:2]}}) == 2, "they met"
    when = {(what, key): float(moment) for what, key, _, moment in lines}
    assert all(when["begin", run.key] >= when["end", teacher.key] for run in runs)
    assert when["begin", speeds[0].key] >= max(when["end", run.key] for run in runs)
    assert when["begin", speeds[1].key] >= when["end", speeds[0].key]
    begun = Counter(key for what, key, *_ in lines if what == "begin")
    assert begun[odd[1].key] == 2 and begun[odd[2].key] == 3
    assert all(begun[job.key] == 1 for job in (teacher, *runs, *speeds))
    assert {result.training.shared for result in runs_of(store)} == {2}
    assert {result.environment.threads for result in speeds_of(store)} == {1}
    assert not any(store.claimed(job) for job in jobs)


def test_ctrl_c_stops_the_workers(tmp_path: Path) -> None:
    """The whole group gets the signal, as at a terminal: workers stop, claims are given back, a second run goes on."""
    code = (
        "import sys; from linvit.comparison.scheduling.scheduler import run;"
        "from linvit.comparison.scheduling.places.gpus import Gpus;"
        "from linvit.comparison.scheduling.store import Store;"
        "from tests.comparison.jobs import make_job, quick\n"
        "if __name__ == '__main__': run([make_job(n, seconds=30) for n in (1, 2)], Store(sys.argv[1]),"
        "watch=lambda job, record: print(record['kind'], flush=True), place=Gpus(quick, per_gpu=2))"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert process.stdout is not None
    lines: list[str] = []
    while lines.count("start") < 2 and (line := process.stdout.readline()):
        lines.append(line.strip())
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 25 and "KeyboardInterrupt" in errors, errors
    store, jobs = Store(tmp_path), [make_job(n, seconds=30) for n in (1, 2)]
    assert not any(store.claimed(job) for job in jobs) and not store.failures()
    assert len(Board(jobs, store).open()) == 2


def test_several_processes_do_one_run_together(tmp_path: Path) -> None:
    """As `torchrun` starts them: all work on the same run, one writes it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from linvit.comparison.scheduling.places.choice import choose;"
        "from linvit.comparison.scheduling.store import Store;"
        "from tests.comparison.jobs import make_job, quick;"
        "summary = choose('auto')([make_job(1), make_job(2), make_job(3, 'speed')], Store(sys.argv[1]),"
        "watch=lambda *_: None, execute=quick); assert summary.complete and len(summary.done) == 2, summary"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    store = Store(tmp_path)
    assert [result.key for result in runs_of(store)] == sorted(make_job(n).key for n in (1, 2))
    for job in (make_job(1), make_job(2)):
        assert len({pid for what, key, pid, _ in log(tmp_path) if (what, key) == ("end", job.key)}) == 2
        assert not store.claimed(job)


def test_a_spoilt_gpu_stops_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access everything else in the process would fail too, and be recorded as failed."""
    import torch

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    store, jobs = Store(tmp_path), [make_job(1, error="x"), make_job(2)]
    board = Board(jobs, store)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "linvit.comparison.scheduling.store.environment", lambda device: {"hardware": device, "time": ""}
    )
    with pytest.raises(LinvitError, match=r"c1 left the GPU unusable \(CUDA error: an illegal"):
        run(jobs, store, Here(quick), watch=Heard())
    assert len(store.failures(jobs[0].key)) == 1 and not store.claimed(jobs[0])
    assert board.open() == [jobs[1]]


@pytest.mark.parametrize("place", [Here, Gpus])
def test_a_full_disk_ends_the_work_and_is_no_jobs_failure(tmp_path: Path, place: type) -> None:
    store, jobs = Store(tmp_path), [make_job(number, full=True) for number in range(3)]
    with pytest.raises(Unwritable, match=r"cannot write .*model: No space left on device"):
        run(jobs, store, place(quick), watch=lambda *_: None)
    assert not store.failures() and not any(store.claimed(job) for job in jobs)


def test_a_result_that_cannot_be_written_ends_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, job = Store(tmp_path), make_job(1)

    def full(*_: object) -> None:
        raise Unwritable("cannot write it: No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(Unwritable, match="No space left"):
        run([job], store, Here(quick), watch=lambda *_: None)
    assert not store.failures() and not store.claimed(job)
