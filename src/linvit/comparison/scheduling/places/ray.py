"""A Ray cluster as a place: one run on a GPU (or on a few CPUs), speeds on each kind of hardware.

The driver claims, sends, collects and writes; workers only compute. So workers need not share the driver's disk, and
the store is the same whichever place filled it. When a worker or its node is lost, its job goes on elsewhere from the
last checkpoint that the driver's store holds.
"""

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from linvit.attention.plugins import VARIABLE
from linvit.comparison.description.job import Job
from linvit.comparison.scheduling.places import ray_worker
from linvit.comparison.scheduling.places.place import Execute, Hear, Place, Record, TimingSlot
from linvit.comparison.scheduling.places.ray_worker import (
    Errand,
    absolute,
    given_folders,
    own_source,
    read_files,
    write_files,
)
from linvit.comparison.scheduling.store import Store, devices_of
from linvit.errors import LinvitError
from linvit.measurement.record import PACKAGE

TICK = 0.5  # seconds between two looks at the cluster
PATIENCE = 120.0  # seconds in which a node must answer
PASSED_ON = ("OMP_NUM_THREADS", "LINVIT_COMMIT", VARIABLE)  # what of the driver's environment workers should share
ANSWER = 5.0  # seconds in which a cluster must
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"  # how a client begins: its preface and no settings
HINT = "start one with `ray start --head`, or use --address local"


@dataclass(frozen=True)
class Node(TimingSlot):
    """A node that takes jobs, and the hardware that its speed files will name."""

    id: str
    cpus: int
    gpus: int
    cpu: str
    gpu: str | None
    reaches_store: bool

    def hardware(self, job: Job) -> str:
        return self.gpu if self.gpu and "cuda" in devices_of(job) else self.cpu


class RayCluster(Place):
    """A cluster at `address`, the one that runs here (`auto`), or one of this machine alone (`local`). A run gets a
    GPU, or its share of one when `per_gpu` runs have it together; without GPUs, `cpus` processors."""

    def __init__(
        self, execute: Execute | None = None, *, address: str = "auto", per_gpu: int = 1, cpus: int | None = None
    ) -> None:
        super().__init__(execute)
        self.address, self.shared, self.wanted_cpus = address, per_gpu, cpus
        self.flying: dict[Any, tuple[Job, str, Any]] = {}  # job, name and worker by Ray's reference
        self.teachers: dict[str, Any] = {}  # in Ray's object store, put there once
        self.known: dict[str, Node] = {}

    @contextmanager
    def opened(self, store: Store, jobs: Sequence[Job]) -> Iterator[None]:
        self.store = store
        with connected(self.address) as self.ray, marked(store) as mark:
            first = replace(jobs[0], places=absolute(jobs[0].places))
            folder = str(store.folder.resolve())
            self.errand = Errand(first, folder, mark, own_source(), self.shared, self.execute)
            self.look_around()
            self.timing_slots()  # every node is asked before any gets work
            from ray.util.queue import Queue

            here = pinned(self.ray.get_runtime_context().get_node_id())
            self.mailbox = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})  # for word from workers
            try:
                yield
            except self.ray.exceptions.RayActorError:
                raise LinvitError("the Ray cluster was lost: the same command goes on from what is finished") from None
            finally:
                with suppress(Exception):  # the cluster itself may be gone
                    self.mailbox.shutdown(force=True)

    # The nodes, as they come and go, and what jobs reserve on them.

    def look_around(self) -> None:
        """What a run reserves; on CPUs as many as its training has threads, or as the largest node has."""
        from linvit.comparison.scheduling.execution.running import THREADS

        alive = [row["Resources"] for row in self.ray.nodes() if row["Alive"]]
        self.gpus = any(resources.get("GPU", 0) >= 1 for resources in alive)
        most = 1 if self.gpus else min(THREADS, max(int(resources.get("CPU", 0)) for resources in alive))
        self.cpus = self.wanted_cpus or max(1, most)
        self.seen = time.monotonic()
        if self.shared > 1 and not self.gpus:
            raise LinvitError("the Ray cluster has no GPU to share: leave out --per-gpu, or say --cpus for each run")
        if not self.rows():
            wants = f"{self.cpus} CPU{'s' * (self.cpus > 1)}{' and a GPU' * self.gpus}"
            raise LinvitError(f"no node of the Ray cluster has {wants} for a run")

    def rows(self) -> dict[str, dict[str, Any]]:
        """Those of Ray's nodes that can take a run: where there are GPUs, only those that have one."""
        found = {}
        for row in self.ray.nodes():
            cpus, gpus = (row["Resources"].get(name, 0) for name in ("CPU", "GPU"))
            if row["Alive"] and cpus >= self.cpus and gpus >= self.gpus:
                found[row["NodeID"]] = row
        return found

    def capacity(self) -> int:
        count = 0
        for row in self.rows().values():
            fit = int(row["Resources"]["CPU"]) // self.cpus
            count += min(fit, int(row["Resources"]["GPU"]) * self.shared) if self.gpus else fit
        if count:
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > PATIENCE:
            raise LinvitError("no node of the Ray cluster is left: the same command goes on when there are some")
        return count

    def timing_slots(self) -> list[Node]:
        """The nodes that take runs. One without linvit, with another linvit or without the data is an error."""
        rows = self.rows()
        asked = {ask(self.ray, self.errand, node): row for node, row in rows.items() if node not in self.known}
        ready, late = self.ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE) if asked else ((), ())
        for ref in ready:
            with suppress(self.ray.exceptions.NodeDiedError, self.ray.exceptions.TaskUnschedulableError):  # gone
                self.known[asked[ref]["NodeID"]] = node_of(asked[ref], self.ray.get(ref))
        for ref in late:
            name = asked[ref]["NodeManagerHostname"]
            raise LinvitError(f"node {name} of the Ray cluster gave no answer in {PATIENCE:.0f} s: is it overloaded?")
        return [self.known[node] for node in rows if node in self.known]

    # The workers, and what they are at.

    def hire(self, job: Job, slot: TimingSlot | None) -> Any:
        """A speed gets a GPU alone; and all processors where they are timed too."""
        room = {"num_cpus": self.cpus, "num_gpus": 1 / self.shared if self.gpus else 0}
        if isinstance(slot, Node):
            gpus = int(slot.gpus > 0 and "cuda" in devices_of(job))
            cpus = slot.cpus if "cpu" in devices_of(job) or not gpus else 1
            room = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": pinned(slot.id)}
        return self.ray.remote(ray_worker.RayWorker).options(**room).remote(self.mailbox)

    def dismiss(self, worker: Any, *, kill: bool = False) -> None:
        self.flying = {ref: flight for ref, flight in self.flying.items() if flight[2] is not worker}
        self.ray.kill(worker) if kill else worker.close.remote()

    def send(self, worker: Any, job: Job, name: str, *, shared: int) -> None:
        errand = replace(self.errand, job=replace(job, places=absolute(job.places)), shared=shared)
        self.flying[worker.work.remote(errand, name, *self.luggage(errand.job))] = job, name, worker

    def luggage(self, job: Job) -> Iterator[Any]:
        """What a worker gets along with a job: what was begun, and the models that it needs, for those that cannot
        reach them."""
        shared_disk = all(node.reaches_store for node in self.known.values())
        yield None if shared_disk else read_files(self.store.work_folder(job.key))
        folders = {key: self.store.teacher_folder(key) for key in job.needs}
        folders |= {place: Path(place) for place in given_folders(job.places).values()}
        for key, folder in folders.items():
            if key not in self.teachers:
                self.teachers[key] = self.ray.put((key, read_files(folder)))
            yield self.teachers[key]

    def poll(self, hear: Hear) -> None:
        ready, _ = self.ray.wait(list(self.flying), timeout=TICK)
        out = {name: job for job, name, _ in self.flying.values()}
        for name, event in self.mailbox.get_nowait_batch(self.mailbox.qsize()):
            if event["kind"] == "checkpoint" and name in out:  # of a worker that has another disk
                folder = self.store.work_folder(out[name].key)
                write_files(folder, event["files"])
                ray_worker.keep_only(folder, event["names"])
            elif name in out:
                hear(name, event)
        for ref in ready:
            job, name, _ = self.flying.pop(ref)
            hear(name, self.ending(ref, job))

    def ending(self, ref: Any, job: Job) -> Record:
        """How a job ended that is no longer out."""
        try:
            ended: Record = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:  # what was sent cannot be read there, or what came back here
            return {"kind": "failure", "failure": self.store.failure(job, error), "spoilt": True}
        except self.ray.exceptions.RayError as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            return {"kind": "lost", "text": text, "begun": True, "spoilt": True}
        if ended["kind"] == "misfit":
            raise LinvitError(ended["text"])
        if ended.get("files"):
            write_files(self.store.teacher_folder(job.key), ended["files"])
        return ended


@contextmanager
def marked(store: Store) -> Iterator[str]:
    """A file in the store by which a node tells that it shares the driver's disk."""
    path = store.folder.resolve() / "claims" / f".driver-{uuid.uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster. A connection that the caller has already is used and left open."""
    try:
        import ray
    except ImportError:
        raise LinvitError("--engine ray needs Ray, which is not installed: pip install 'linvit[ray]'") from None
    with redirect_stdout(cast(IO[str], OneVoice(sys.stdout))):
        own = not ray.is_initialized()
        if own:
            connect(ray, address)
        try:
            yield ray
        finally:
            if own:
                ray.shutdown()


class OneVoice:
    """A stdout for one thread alone. Ray prints pages about a lost worker from another, where results belong; what
    matters of them comes as a record."""

    def __init__(self, out: IO[str]) -> None:
        self.out, self.owner = out, threading.current_thread()

    def write(self, text: str) -> int:
        return self.out.write(text) if threading.current_thread() is self.owner else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


def connect(ray: Any, address: str) -> None:
    """Workers get a part of this environment; a checkout that is not installed, and modules of the user's own, are
    looked for where the driver has them."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit() and not speaks_grpc(host.strip("[]"), int(port)):  # Ray itself would try for minutes
        raise LinvitError(f"no Ray cluster answers at {address}: {HINT}")
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    places = [str(PACKAGE.parent)] if "site-packages" not in PACKAGE.parts else []
    places += [os.getcwd()] if VARIABLE in passed else []
    if places:
        passed["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": passed}, **local)
    except Exception as error:  # Ray has many for an address that is none, some of them its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise LinvitError(f"cannot connect to a Ray cluster ({reason}): {HINT}") from None


def speaks_grpc(host: str, port: int) -> bool:
    """Whether a server answers as Ray's do, with the settings that an HTTP/2 connection begins with."""
    try:
        with socket.create_connection((host, port), timeout=ANSWER) as connection:
            connection.sendall(HTTP2)
            return connection.recv(9)[3:4] == b"\x04"
    except (OSError, OverflowError, UnicodeError):  # nobody there, no such port, no such name
        return False


def pinned(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def ask(ray: Any, errand: Errand, node: str) -> Any:
    """Send the question to a node. The function goes by value, so that it arrives where there is no linvit."""
    sent = (errand.source, errand.job.places, errand.mark)

    def question() -> dict[str, Any]:
        try:
            from linvit.comparison.scheduling.places.ray_worker import look

            return look(*sent)
        except Exception as error:
            return {"misfit": f"has no linvit that fits ({error}): install the driver's version on every node"}

    return ray.remote(question).options(num_cpus=0, max_retries=2, scheduling_strategy=pinned(node)).remote()


def node_of(row: dict[str, Any], told: dict[str, Any]) -> Node:
    """A node by what Ray and what it says of itself."""
    if told["misfit"]:
        name = f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})"
        raise LinvitError(f"node {name} of the Ray cluster {told['misfit']}")
    resources = row["Resources"]
    cpus, gpus = int(resources["CPU"]), int(resources.get("GPU", 0))
    return Node(row["NodeID"], cpus, gpus, told["cpu"], told["gpu"] if gpus else None, told["reaches_store"])
