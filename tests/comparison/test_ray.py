"""The Ray engine on a real cluster: two nodes on this machine, each with one processor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from linvit.comparison.description.job import Job
from linvit.comparison.description.spec import Comparison, Measure
from linvit.comparison.files import parse_result
from linvit.comparison.results import Run, Speed
from linvit.comparison.scheduling.places import ray as engine
from linvit.comparison.scheduling.places.place import Here, real_execute
from linvit.comparison.scheduling.places.ray import RayCluster, speaks_grpc
from linvit.comparison.scheduling.places.ray_worker import (
    read_files,
)
from linvit.comparison.scheduling.scheduler import run
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from tests.comparison.jobs import log, make_job, make_result, quick, runs_of, speeds_of, without_timings
from tests.comparison.small import expand

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # of linvit and of the tests, for workers
PLAIN = ("batch_size=256", "precision=fp32", "log_steps=1", "checkpoint_seconds=0")
TINY = Comparison(
    mode="distil",
    recipe="fast",
    plans=("stella",),
    settings=("epochs=1", *PLAIN),
    teacher_settings=("epochs=4", *PLAIN),
    architecture={"model": "fair", "width": 16, "depths": [1, 1], "heads": [1, 2]},
    patch_size=(8,),
    size=(32,),
    measure=Measure(size=(32,), batch=2, devices=("cpu",)),
)


class Ear:
    """Hears what an engine tells, and may act on it."""

    def __init__(self, act: Callable[[Job, dict[str, Any]], None] = lambda job, record: None) -> None:
        self.heard: list[tuple[Job, dict[str, Any]]] = []
        self.act = act

    def __call__(self, job: Job, record: dict[str, Any]) -> None:
        self.heard.append((job, record))
        self.act(job, record)

    def kinds(self, key: str) -> list[str]:
        return [record["kind"] for job, record in self.heard if job.key == key]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for every other test on the machine
        patch.setenv("RAY_num_workers_soft_limit", "4")  # idle ones, with all they imported, serve the next test
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they start when they are needed
        made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        made.add_node(**small)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def ray(cluster: Any) -> Iterator[Any]:
    """A connection that tests share, so that they also share warm workers. It has no environment of its own, for which
    Ray would start Python twice for each worker; workers look for the tests where we stand."""
    import ray

    with chdir(ROOT):
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What the local engine makes of the tiny comparison."""
    store = Store(tmp_path_factory.mktemp("local"))
    assert run(expand(TINY), store, Here(), watch=Ear()).complete
    return store


def files(store: Store) -> dict[str, Any]:
    found = sorted([*store.folder.glob("runs/*.json"), *store.folder.glob("speeds/*.json")])
    return {path.name: without_timings(parse_result(path.read_bytes(), path.name)) for path in found}


def test_a_cluster_too_small_is_refused(ray: Any, tmp_path: Path) -> None:
    for options, message in (
        ({"per_gpu": 2}, "has no GPU to share"),
        ({"cpus": 2}, "no node of .* has 2 CPUs for a run"),
    ):
        with pytest.raises(LinvitError, match=message):
            run([make_job(0)], Store(tmp_path), RayCluster(quick, **options), watch=Ear())


def test_a_node_with_other_code_or_without_the_data_is_named(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "own_source", lambda: "9.9 (0123)")
    with pytest.raises(
        LinvitError, match=r"^node \S+ \(\S+\) of the Ray cluster runs linvit .*, the driver 9.9"
    ) as caught:
        run([make_job(0)], Store(tmp_path), RayCluster(quick), watch=Ear())
    assert (
        "\n" not in str(caught.value) and not any(tmp_path.glob("claims/[!.]*")) and not any(tmp_path.glob("*/*.json"))
    )


def test_the_same_files_though_a_worker_is_killed(
    ray: Any, expected: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have another disk here: teacher, checkpoints and results travel through Ray. One is killed in the middle
    of its run, and another goes on from the checkpoint."""

    @contextmanager
    def unseen(store: Store) -> Iterator[str]:
        yield "/no/such/file"

    def slowly(job: Job, store: Store, *, watch: Any, **options: Any) -> Run | Speed:
        def hear(record: dict[str, Any]) -> None:
            watch(record)
            time.sleep(0.3 if record["kind"] == "train" and job.kind == "teacher" else 0)

        return real_execute(job, store, watch=hear, **options)

    def kill(job: Job, record: dict[str, Any]) -> None:
        kept = list(store.work_folder(teacher).rglob("step-*.safetensors"))
        if job.key == teacher and kept and "lost" not in ear.kinds(teacher) and record["kind"] == "train":
            with suppress(ProcessLookupError):  # killed a moment ago, and Ray has not noticed
                os.kill(next(r["pid"] for _, r in ear.heard if r["kind"] == "start"), signal.SIGKILL)

    monkeypatch.setattr(engine, "marked", unseen)
    store, ear, jobs = Store(tmp_path), Ear(kill), expand(TINY)
    teacher = jobs[0].key
    summary = run(jobs, store, RayCluster(slowly), watch=ear)
    assert summary.complete and set(summary.done) == {job.key for job in jobs}
    assert files(store) == files(expected) and len(files(store)) == 3
    assert read_files(store.teacher_folder(teacher)) == read_files(expected.teacher_folder(teacher))
    assert not any(store.folder.glob("work/*")) and not any(store.folder.glob("claims/[!.]*"))
    assert store.failures() == []

    (lost,) = [record for _, record in ear.heard if record["kind"] == "lost"]
    assert lost["attempt"] == 1 and ear.kinds(teacher).count("start") == 2
    notes = [record["text"] for job, record in ear.heard if record["kind"] == "note" and job.key == teacher]
    assert any(text.startswith("resumed after step") for text in notes)
    assert all(ear.kinds(job.key)[0] == "start" and ear.kinds(job.key)[-1] == "done" for job in jobs)
    done = [job.kind for job, record in ear.heard if record["kind"] == "done"]
    assert done == ["teacher", "run", "speed"]


def at_once(job: Job, store: Store, **options: Any) -> Run | Speed:
    return make_result(job)


def ended(pid: int) -> bool:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    return not Path(f"/proc/{pid}").exists()


def test_ctrl_c_ends_the_workers_and_leaves_the_store_good(ray: Any, tmp_path: Path) -> None:
    def interrupt(job: Job, record: dict[str, Any]) -> None:
        if "done" in ear.kinds(first.key) and "train" in ear.kinds(second.key):
            signal.raise_signal(signal.SIGINT)

    first, second = make_job(0), make_job(1, seconds=600)
    store, ear = Store(tmp_path), Ear(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run([first, second], store, RayCluster(quick), watch=ear)
    assert not any(tmp_path.glob("claims/[!.]*")) and not any(tmp_path.glob("claims/.driver*"))
    assert store.failures() == [] and store.finished(first) and not store.finished(second)
    assert ended(next(int(pid) for what, key, pid, _ in log(tmp_path) if key == second.key))


DRIVER = """
import sys
from linvit.comparison.scheduling.places.ray import RayCluster
from linvit.comparison.scheduling.scheduler import run
from linvit.comparison.scheduling.store import Store
from tests.comparison.jobs import make_job, quick

jobs = [make_job(number, seconds=float(seconds)) for number, seconds in enumerate(sys.argv[3:])]
tell = lambda job, record: print(record["kind"], job.label.seed, file=sys.stderr, flush=True)
run(jobs, Store(sys.argv[1]), RayCluster(quick, address=sys.argv[2]), watch=tell)
"""


def test_two_drivers_share_a_store_and_one_outlives_the_other(ray: Any, cluster: Any, tmp_path: Path) -> None:
    """A driver with a connection of its own is killed for good in the end; ours takes over what it worked on."""
    seconds = [600, 1, 1]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), cluster.address, *map(str, seconds)]
    env = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as other:
        try:
            assert other.stderr is not None
            said = []
            while "train 0" not in said:
                said.append(other.stderr.readline().strip())
                assert said[-1], said
            jobs = [make_job(number, seconds=value) for number, value in enumerate(seconds)]

            store = Store(tmp_path)

            def kill() -> None:
                while len(list(tmp_path.glob("claims/[!.]*"))) > 1 or not all(map(store.finished, jobs[1:])):
                    time.sleep(0.1)
                other.kill()

            threading.Thread(target=kill, daemon=True).start()
            summary = run(jobs, store, RayCluster(at_once), watch=Ear())
            assert summary.complete and jobs[0].key in summary.done
        finally:
            other.kill()
    begun = [key for what, key, *_ in log(tmp_path) if what == "begin"]
    assert len(begun) == len(set(begun)), "a job was done twice"
    assert not any(tmp_path.glob("claims/[!.]*"))
    assert ended(next(int(pid) for what, key, pid, _ in log(tmp_path) if key == jobs[0].key))


def test_runs_share_gpus_speeds_come_last_and_alone_and_failures_stop_no_other(
    ray: Any, cluster: Any, tmp_path: Path
) -> None:
    """Ray takes our word for a GPU, which is enough to see where jobs go."""
    node = cluster.add_node(num_cpus=3, num_gpus=1, object_store_memory=100 * 2**20)
    try:
        runs = [make_job(number, seconds=0.8) for number in range(4)]
        speeds = [make_job(number, "speed", seconds=0.3) for number in (10, 11)]
        wrong, teacher = make_job(20, error="no such thing"), make_job(21, "teacher", error="untaught")
        student = make_job(22, needs=(teacher.key,))
        store, well = Store(tmp_path), [*speeds, *runs]
        summary = run([teacher, wrong, *well, student], store, RayCluster(quick, per_gpu=2), watch=Ear())
    finally:
        cluster.remove_node(node)
    assert set(summary.done) == {job.key for job in well} and set(summary.failed) == {wrong.key, teacher.key}
    assert summary.missing == (student.key,)
    (failure,) = store.failures(wrong.key)
    assert failure.error == "RuntimeError: no such thing" and "in quick" in failure.traceback
    assert failure.command == wrong.command and failure.attempt == 1
    times = {(what, key): float(at) for what, key, _, at in log(tmp_path)}
    spans = {job.key: (times["begin", job.key], times["end", job.key]) for job in well}
    assert max(sum(a <= spans[job.key][0] < b for a, b in spans.values()) for job in runs) <= 2
    last = max(spans[job.key][1] for job in runs)
    early, late = sorted(spans[job.key] for job in speeds)
    assert last < early[0] < early[1] < late[0]
    assert {result.training.shared for result in runs_of(store)} == {2}
    assert {result.environment.threads for result in speeds_of(store)} == {1}


def test_a_cluster_is_known_by_its_answer(cluster: Any) -> None:
    host, _, port = cluster.address.rpartition(":")
    assert speaks_grpc(host, int(port))
