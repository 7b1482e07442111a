"""A Ray cluster as a place: one run on a GPU (or on a few CPUs), speeds on each kind of hardware.

The driver claims, sends, collects and writes; workers only compute. So workers need not share the driver's disk, and
the store is the same whichever place filled it. When a worker or its node is lost, its task goes on elsewhere from the
last checkpoint that the driver's store holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.places.place import Execute, Hear, Place, Record, TimingSlot
from linvit.comparison.scheduling.places.ray_cluster import Cluster, Node, connected
from linvit.comparison.scheduling.places.ray_files import keep_only, read_files, write_files
from linvit.comparison.scheduling.places.ray_worker import Errand, RayWorker, absolute, own_source
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError

TICK = 0.5  # seconds between two looks at the cluster


class RayCluster(Place):
    """A cluster at `address`, the one that runs here (`auto`), or one of this machine alone (`local`). A run gets a
    GPU, or its share of one when `per_gpu` runs have it together; without GPUs, `cpus` processors."""

    def __init__(
        self, execute: Execute | None = None, *, address: str = "auto", per_gpu: int = 1, cpus: int | None = None
    ) -> None:
        super().__init__(execute)
        self.address, self.shared, self.cpus = address, per_gpu, cpus
        self.flying: dict[Any, tuple[Task, str, Any]] = {}  # task, name and worker by Ray's reference
        self.teachers: dict[str, Any] = {}  # in Ray's object store, put there once

    @contextmanager
    def opened(self, store: Store, tasks: Sequence[Task]) -> Iterator[None]:
        self.store = store
        with connected(self.address) as self.ray, marked(store) as mark:
            task, folder = travelling(tasks[0]), str(store.folder.resolve())
            self.errand = Errand(task, folder, mark, own_source(), self.shared, self.execute)
            self.cluster = Cluster(self.ray, self.errand, self.shared, self.cpus)
            self.cluster.alive()  # every node is asked before any gets work
            self.mailbox = self.cluster.mailbox()
            try:
                yield
            except self.ray.exceptions.RayActorError:
                raise LinvitError("the Ray cluster was lost: the same command goes on from what is finished") from None
            finally:
                with suppress(Exception):  # the cluster itself may be gone
                    self.ray.kill(self.mailbox)

    def capacity(self) -> int:
        return self.cluster.slots()

    def timing_slots(self) -> list[Node]:
        return self.cluster.alive()

    def hire(self, task: Task, slot: TimingSlot | None) -> Any:
        room = self.cluster.for_speed(slot, task) if isinstance(slot, Node) else self.cluster.for_run()
        return self.ray.remote(RayWorker).options(**room).remote(self.mailbox)

    def dismiss(self, worker: Any, *, kill: bool = False) -> None:
        self.flying = {ref: flight for ref, flight in self.flying.items() if flight[2] is not worker}
        self.ray.kill(worker) if kill else worker.close.remote()

    def send(self, worker: Any, task: Task, name: str, *, shared: int) -> None:
        self.flying[worker.work.remote(*self.luggage(travelling(task), name, shared))] = task, name, worker

    def luggage(self, task: Task, name: str, shared: int) -> Iterator[Any]:
        """What a worker gets along with a task: what was begun, and the teachers, for those that cannot reach them."""
        yield replace(self.errand, task=task, shared=shared)
        yield name
        yield None if self.cluster.shares_disk() else read_files(self.store.work_folder(task.key))
        folders = {key: self.store.teacher_folder(key) for key in task.needs}
        given = task.places.get("teacher")
        if given and Path(given).is_dir():
            folders[given] = Path(given)
        for key, folder in folders.items():
            if key not in self.teachers:
                self.teachers[key] = self.ray.put((key, read_files(folder)))
            yield self.teachers[key]

    def poll(self, hear: Hear) -> None:
        ready, _ = self.ray.wait(list(self.flying), timeout=TICK)
        out = {name: task for task, name, _ in self.flying.values()}
        for name, event in self.ray.get(self.mailbox.take.remote()):
            if event["kind"] == "checkpoint" and name in out:  # of a worker that has another disk
                folder = self.store.work_folder(out[name].key)
                write_files(folder, event["files"])
                keep_only(folder, event["names"])
            elif name in out:
                hear(name, event)
        for ref in ready:
            task, name, _ = self.flying.pop(ref)
            hear(name, self.ending(ref, task))

    def ending(self, ref: Any, task: Task) -> Record:
        """How a task ended that is no longer out."""
        try:
            ended: Record = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:  # what was sent cannot be read there, or what came back here
            return {"kind": "failure", "failure": self.store.failure(task, error), "spoilt": True}
        except self.ray.exceptions.RayError as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            return {"kind": "lost", "text": text, "begun": True, "spoilt": True}
        if ended["kind"] == "misfit":
            raise LinvitError(ended["text"])
        if ended.get("files"):
            write_files(self.store.teacher_folder(task.key), ended["files"])
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


def travelling(task: Task) -> Task:
    return replace(task, places=absolute(task.places))
