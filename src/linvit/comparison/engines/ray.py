"""The Ray engine: the grid on a cluster, one run on a GPU (or on a few CPUs), speeds after the runs and alone.

The driver claims, sends, collects and writes; workers only compute. So workers need not share the driver's disk, and
the store is the same whichever engine filled it. When a worker or its node is lost, its task goes on elsewhere from the
last checkpoint that the driver's store holds. A task that fails by itself is recorded and not tried again.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linvit.comparison.claims import Claim, take
from linvit.comparison.engines import POLL, Board, Execute, Summary, Watch, real_execute
from linvit.comparison.engines.ray_cluster import Cluster, Node, connected
from linvit.comparison.engines.ray_files import keep_only, read_files, write_files
from linvit.comparison.engines.ray_worker import Errand, Worker, absolute, own_source, time_alone
from linvit.comparison.grid import Task
from linvit.comparison.store import Store, place, to_bytes
from linvit.errors import LinvitError

TICK = 0.5  # seconds between two looks at the cluster
TRIES = 3  # of a task whose worker is lost


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    watch: Watch,
    retry: bool = False,
    address: str = "auto",
    per_gpu: int = 1,
    cpus: int | None = None,
    execute: Execute = real_execute,
) -> Summary:
    """Do the tasks on a cluster: at `address`, on the one that runs here (`auto`), or on this machine alone (`local`).
    A run gets a GPU, or its share of one when `per_gpu` runs have it together; without GPUs, `cpus` processors."""
    if not tasks:
        return Summary()
    with connected(address) as ray, marked(store) as mark:
        board = Board(tasks, store, retry=retry, anywhere=True)
        errand = Errand(travelling(tasks[0]), str(store.folder.resolve()), mark, own_source(), per_gpu, execute)
        driver = Driver(ray, Cluster(ray, errand, per_gpu, cpus), board, watch, errand)
        try:
            driver.run()
        except ray.exceptions.RayActorError:
            raise LinvitError("the Ray cluster was lost: the same command goes on from what is finished") from None
        finally:
            driver.stop()
    return board.summary()


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


@dataclass(eq=False)
class Hand:
    """A worker process of ours on the cluster. It remembers whose compiled steps it has."""

    actor: Any
    affinity: str = ""


@dataclass(frozen=True)
class Flight:
    """A task that is out, with the claim on it: a run with the hand that does it, or a speed with its node."""

    task: Task
    claim: Claim
    hand: Hand | None = None
    node: Node | None = None

    @property
    def name(self) -> str:
        return self.claim.path.name


class Driver:
    """Keeps the cluster busy until nothing is left."""

    def __init__(self, ray: Any, cluster: Cluster, board: Board, watch: Watch, errand: Errand) -> None:
        self.ray, self.cluster, self.board, self.watch, self.errand = ray, cluster, board, watch, errand
        self.store = board.store
        self.hands: list[Hand] = []
        self.flying: dict[Any, Flight] = {}
        self.losses: Counter[str] = Counter()
        self.teachers: dict[str, Any] = {}  # in Ray's object store, put there once
        self.mailbox = cluster.mailbox()

    def run(self) -> None:
        if not self.left():
            return
        self.cluster.alive()  # every node is asked before any gets work
        looked = 0.0
        while True:
            if time.monotonic() - looked >= POLL:
                self.fill()
                if not self.flying and not self.left():
                    return
                looked = time.monotonic()
            if self.tick():
                looked = 0.0

    def left(self) -> bool:
        """Whether there is something to do, or to wait for while others do it."""
        return any(task.kind != "speed" for task in self.board.open()) or any(self.speeds())

    def fill(self) -> None:
        """Send as much as the cluster takes: runs, and speeds when no run is left."""
        out = {flight.task.key for flight in self.flying.values()}
        runs = [task for task in self.board.open() if task.kind != "speed" and task.key not in out]
        ready = [task for task in runs if self.board.blocked(task) is None]
        busy = [flight.hand for flight in self.flying.values()]
        free: list[Hand | None] = [hand for hand in self.hands if hand not in busy]
        free += [None] * (self.cluster.slots() - len(self.hands))
        for hand in free:
            if not self.send_run(ready, hand) and hand is not None:
                self.dismiss(hand)
        if not self.hands and all(map(self.store.claimed, runs)):
            for node, task in self.speeds():
                if node not in [flight.node for flight in self.flying.values()]:
                    self.send_speed(task, node)

    def speeds(self) -> Iterator[tuple[Node, Task]]:
        """What is still to be timed, and where: every candidate once on each kind of hardware."""
        tasks = [task for task in self.board.tasks if task.kind == "speed"]
        tasks = [task for task in tasks if len(self.store.failures(task.key)) <= self.board.forgiven[task.key]]
        for node in self.cluster.alive() if tasks else ():
            for task in tasks:
                if self.store.read(self.store.path(task, node.hardware(task))) is None:
                    yield node, task

    def send_run(self, ready: list[Task], hand: Hand | None) -> bool:
        """Give a hand, perhaps a new one, the run that suits it best: of the candidate it did before, else of one that
        no other hand does. False where there is none to be had."""
        from linvit.comparison.sharing import affinity

        others = {other.affinity for other in self.hands}
        mine = hand.affinity if hand else ""
        for task in sorted(ready, key=lambda task: (affinity(task) != mine, affinity(task) in others)):
            ready.remove(task)
            claim = self.claim(task, self.store.path(task))
            if claim is not None:
                hand = hand or self.hire()
                hand.affinity = affinity(task)
                ref = hand.actor.work.remote(*self.luggage(task, claim, self.errand.shared))
                self.flying[ref] = Flight(task, claim, hand)
                return True
        return False

    def hire(self) -> Hand:
        made = self.ray.remote(Worker).options(**self.cluster.for_run()).remote(self.mailbox)
        self.hands.append(Hand(made))
        return self.hands[-1]

    def dismiss(self, hand: Hand, *, kill: bool = False) -> None:
        """Let a worker go, and with it what it holds of the cluster."""
        self.hands.remove(hand)
        self.ray.kill(hand.actor) if kill else hand.actor.close.remote()

    def send_speed(self, task: Task, node: Node) -> None:
        claim = self.claim(task, self.store.path(task, node.hardware(task)))
        if claim is not None:
            remote = self.ray.remote(time_alone).options(max_retries=0, **self.cluster.for_speed(node, task))
            self.flying[remote.remote(self.mailbox, *self.luggage(task, claim, 1))] = Flight(task, claim, node=node)

    def claim(self, task: Task, path: Path) -> Claim | None:
        """The right to fill `path`; speeds are claimed for the hardware they are timed on."""
        claim = take(self.store.folder / "claims" / path.stem, self.store.beat, self.store.stale)
        if claim is not None and self.store.read(path) is not None:
            claim.release()
            return None
        return claim

    def luggage(self, task: Task, claim: Claim, shared: int) -> Iterator[Any]:
        """What a worker gets along with a task: what was begun, and the teachers, for those that cannot reach them."""
        task = travelling(task)
        yield replace(self.errand, task=task, shared=shared)
        yield claim.path.name
        yield None if self.cluster.shares_disk() else read_files(self.store.work_folder(task.key))
        folders = {key: self.store.teacher_folder(key) for key in task.needs}
        given = task.places.get("teacher")
        if given and Path(given).is_dir():
            folders[given] = Path(given)
        for name, folder in folders.items():
            if name not in self.teachers:
                self.teachers[name] = self.ray.put((name, read_files(folder)))
            yield self.teachers[name]

    def tick(self) -> bool:
        """Wait a moment for the workers; whether one of them ended."""
        ready = []
        if self.flying:
            ready, _ = self.ray.wait(list(self.flying), timeout=TICK)
        else:
            time.sleep(TICK)
        self.hear()
        for ref in ready:
            self.settle(ref)
        for ref, flight in list(self.flying.items()):
            if flight.claim.lost:  # this process slept, and another driver took over
                self.cancel(ref)
        return bool(ready)

    def hear(self) -> None:
        """Pass on what the workers said, and keep the checkpoints of those that have another disk."""
        flying = {flight.name: flight.task for flight in self.flying.values()}
        for name, event in self.ray.get(self.mailbox.take.remote()):
            if name not in flying:
                continue
            if event["kind"] == "checkpoint":
                folder = self.store.work_folder(flying[name].key)
                write_files(folder, event["files"])
                keep_only(folder, event["names"])
            else:
                self.watch(flying[name], event)

    def settle(self, ref: Any) -> None:
        """Write down what came of a task, and only then let go of it."""
        flight = self.flying[ref]
        spoilt = True
        try:
            outcome = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:  # what was sent cannot be read there, or what came back here
            self.failed(flight.task, self.store.fail(flight.task, error))
        except self.ray.exceptions.RayError as error:
            self.lose(flight, error)
        else:
            self.keep(flight.task, outcome)
            spoilt = outcome.get("spoilt", False)
        del self.flying[ref]
        flight.claim.release()
        if flight.hand is not None and spoilt:
            self.dismiss(flight.hand, kill=True)

    def keep(self, task: Task, outcome: dict[str, Any]) -> None:
        if "misfit" in outcome:
            raise LinvitError(f"node {outcome['node']} of the Ray cluster {outcome['misfit']}")
        if "failure" in outcome:
            record = {**outcome["failure"], "attempt": len(self.store.failures(task.key)) + 1, "command": task.command}
            content = to_bytes(record)
            name = f"{task.key}-{hashlib.sha256(content).hexdigest()[:8]}.json"
            place(self.store.folder / "failures" / name, content)
            self.failed(task, record)
            return
        if outcome["teacher"]:
            write_files(self.store.teacher_folder(task.key), outcome["teacher"])
        self.store.write(task, {**outcome["result"], "command": task.command})
        self.watch(task, {"kind": "done"})

    def failed(self, task: Task, record: dict[str, Any]) -> None:
        self.watch(task, {"kind": "failed", "error": record["error"]})

    def lose(self, flight: Flight, error: Exception) -> None:
        """Let a task whose worker died be sent again, unless that happened too often."""
        self.losses[flight.name] += 1
        count, reason = self.losses[flight.name], (str(error).strip() or type(error).__name__).splitlines()[0]
        self.watch(flight.task, {"kind": "lost", "text": reason, "attempt": count})
        if count >= TRIES:
            self.failed(flight.task, self.store.fail(flight.task, f"its worker was lost {count} times: {reason}"))

    def cancel(self, ref: Any) -> None:
        """End a task that is out and give its claim back: whoever comes next goes on from its checkpoints."""
        flight = self.flying.pop(ref)
        with suppress(Exception):  # the cluster itself may be gone
            if flight.hand is not None:
                self.dismiss(flight.hand, kill=True)
            else:
                self.ray.cancel(ref, force=True)
        flight.claim.release()

    def stop(self) -> None:
        for ref in list(self.flying):
            self.cancel(ref)
        with suppress(Exception):
            for hand in list(self.hands):
                self.dismiss(hand)
            self.ray.kill(self.mailbox)


def travelling(task: Task) -> Task:
    return replace(task, places=absolute(task.places))
