"""A Ray cluster as the comparison sees it: how to reach it, its nodes, and whether they fit."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.places.ray_worker import Errand
from linvit.comparison.scheduling.store import devices_of
from linvit.errors import LinvitError
from linvit.measurement.record import PACKAGE

PATIENCE = 120.0  # seconds in which a node must answer
PASSED_ON = ("OMP_NUM_THREADS", "LINVIT_COMMIT")  # what of the driver's environment workers should share


@dataclass(frozen=True)
class Node:
    """A node that takes tasks, and the hardware that its speed files will name."""

    id: str
    name: str
    cpus: int
    gpus: int
    cpu: str
    gpu: str | None
    reaches_store: bool

    def hardware(self, task: Task) -> str:
        return self.gpu if self.gpu and "cuda" in devices_of(task) else self.cpu


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise LinvitError("--engine ray needs Ray, which is not installed: pip install 'linvit[ray]'") from None
    return ray


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster. A connection that the caller has already is used and left open."""
    ray = import_ray()
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
    hint = "start one with `ray start --head`, or use --address local"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit() and not listens(host, int(port)):  # Ray itself would try for minutes
        raise LinvitError(f"no Ray cluster answers at {address}: {hint}")
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="error", runtime_env=runtime(), **local)
    except (ConnectionError, RuntimeError, ValueError, AssertionError, TimeoutError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise LinvitError(f"cannot connect to a Ray cluster ({reason}): {hint}") from None


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=5).close()
    except OSError:
        return False
    return True


def runtime() -> dict[str, Any]:
    """The environment of workers. A checkout that is not installed is looked for where the driver has it."""
    found = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    if "site-packages" not in PACKAGE.parts:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {"env_vars": found}


class Cluster:
    """The nodes of a cluster, as they come and go, and what tasks reserve on them."""

    def __init__(self, ray: Any, errand: Errand, per_gpu: int, cpus: int | None) -> None:
        self.ray, self.errand, self.per_gpu = ray, errand, per_gpu
        self.gpus = any(row["Alive"] and row["Resources"].get("GPU", 0) >= 1 for row in ray.nodes())
        self.cpus = cpus or (1 if self.gpus else fitting_cpus(ray))
        self.known: dict[str, Node] = {}
        self.seen = time.monotonic()
        if per_gpu > 1 and not self.gpus:
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

    def slots(self) -> int:
        """How many runs the cluster takes at once, as it is now."""
        count = 0
        for row in self.rows().values():
            fit = int(row["Resources"]["CPU"]) // self.cpus
            count += min(fit, int(row["Resources"]["GPU"]) * self.per_gpu) if self.gpus else fit
        if count:
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > PATIENCE:
            raise LinvitError("no node of the Ray cluster is left: the same command goes on when there are some")
        return count

    def alive(self) -> list[Node]:
        """The nodes that take runs. One without linvit, with another linvit or without the data is an error."""
        rows = self.rows()
        asked = {ask(self.ray, self.errand, node): row for node, row in rows.items() if node not in self.known}
        if asked:
            ready, late = self.ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE)
            for ref in ready:
                with suppress(self.ray.exceptions.NodeDiedError, self.ray.exceptions.TaskUnschedulableError):  # gone
                    self.known[asked[ref]["NodeID"]] = node_of(asked[ref], self.ray.get(ref))
            for ref in late:
                name = asked[ref]["NodeManagerHostname"]
                raise LinvitError(
                    f"node {name} of the Ray cluster gave no answer in {PATIENCE:.0f} s: is it overloaded?"
                )
        return [self.known[node] for node in rows if node in self.known]

    def shares_disk(self) -> bool:
        """Whether all nodes reach the store."""
        return all(node.reaches_store for node in self.known.values())

    def for_run(self) -> dict[str, Any]:
        return {"num_cpus": self.cpus, "num_gpus": 1 / self.per_gpu if self.gpus else 0}

    def for_speed(self, node: Node, task: Task) -> dict[str, Any]:
        """A GPU alone; and all processors where they are timed too."""
        gpus = int(node.gpus > 0 and "cuda" in devices_of(task))
        cpus = node.cpus if "cpu" in devices_of(task) or not gpus else 1
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": pinned(node.id)}

    def mailbox(self) -> Any:
        """An actor beside the driver where workers leave word for it. It goes by value, and so needs no linvit and no
        torch."""

        class Mailbox:
            def __init__(self) -> None:
                self.events: list[Any] = []

            def send(self, name: str, event: dict[str, Any]) -> None:
                self.events.append((name, event))

            def take(self) -> list[Any]:
                events, self.events = self.events, []
                return events

        here = pinned(self.ray.get_runtime_context().get_node_id())
        return self.ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()


def fitting_cpus(ray: Any) -> int:
    """As many as a training on the CPU has threads, or as the largest node has."""
    from linvit.comparison.scheduling.execution.running import THREADS

    return max(1, min(THREADS, max(int(row["Resources"].get("CPU", 0)) for row in ray.nodes() if row["Alive"])))


def pinned(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def ask(ray: Any, errand: Errand, node: str) -> Any:
    """Send the question to a node. The function goes by value, so that it arrives where there is no linvit."""
    sent = (errand.source, errand.task.places, errand.mark)

    def question() -> dict[str, Any]:
        try:
            from linvit.comparison.scheduling.places.ray_worker import look

            return look(*sent)
        except Exception as error:
            return {"misfit": f"has no linvit that fits ({error}): install the driver's version on every node"}

    return ray.remote(question).options(num_cpus=0, max_retries=2, scheduling_strategy=pinned(node)).remote()


def node_of(row: dict[str, Any], told: dict[str, Any]) -> Node:
    """A node by what Ray and what it says of itself."""
    name = f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})"
    if told["misfit"]:
        raise LinvitError(f"node {name} of the Ray cluster {told['misfit']}")
    resources = row["Resources"]
    cpus, gpus = int(resources["CPU"]), int(resources.get("GPU", 0))
    return Node(row["NodeID"], name, cpus, gpus, told["cpu"], told["gpu"] if gpus else None, told["reaches_store"])
