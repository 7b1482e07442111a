"""What happens on a worker of a Ray cluster: one task, and its files there and back where the disk is not the driver's.

Ray itself is not needed here: the driver makes actors and remote functions of this.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from linvit.comparison.description.task import Task
from linvit.comparison.scheduling.places.place import Execute, Record, attempt
from linvit.comparison.scheduling.places.ray_files import Files, mirrored, read_files, write_files
from linvit.comparison.scheduling.store import Store
from linvit.measurement.record import cpu, source_digest
from linvit.version import __version__

QUIET = 0.5  # seconds between two records of training that are worth sending
Send = Callable[[Record], None]


@dataclass(frozen=True)
class Errand:
    """A task on its way to a worker. Its `places` are absolute: a worker has a working folder of its own."""

    task: Task
    store: str
    mark: str  # a file in the store: a node that sees it shares the driver's disk
    source: str  # the driver's code
    shared: int
    execute: Execute


def absolute(places: dict[str, str]) -> dict[str, str]:
    """Places on this machine from the root of the file system on; names of sets and models stay as they are."""
    found = dict(places)
    data, root, teacher = (places.get(name, "") for name in ("data", "root", "teacher"))
    if root:
        found["root"] = str(Path(root).resolve())
    if data not in ("", "digits") and Path(root, data).exists():
        found["data"] = str(Path(root, data).resolve())
    if teacher and Path(teacher).is_dir():
        found["teacher"] = str(Path(teacher).resolve())
    return found


@cache
def own_source() -> str:
    """The code of this process, as it was when first asked: people go on editing while a comparison runs."""
    return f"{__version__} ({source_digest()})"


def look(source: str, places: dict[str, str], mark: str) -> dict[str, Any]:
    """What the driver wants to know of a node before it sends work: whether it fits, and what hardware it is."""
    return {"misfit": misfit(source, places), "reaches_store": Path(mark).exists(), "cpu": cpu(), "gpu": gpu()}


def gpu() -> str | None:
    """The name of this node's GPU; asked in a process of its own, as Ray hides GPUs from those who reserve none."""
    if not Path("/dev/nvidiactl").exists():
        return None
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    told = subprocess.run([sys.executable, "-c", code], env=seen, capture_output=True, text=True)
    return told.stdout.strip() or None


def misfit(source: str, places: dict[str, str]) -> str | None:
    """Why tasks cannot be done on this node, in one line; None if they can."""
    here = own_source()
    if here != source:
        return f"runs linvit {here}, the driver {source}: install the same linvit on every node"
    for what in ("data", "root"):
        place = places.get(what, "")
        if place.startswith(os.sep) and not Path(place).exists():
            return f"has no {place}: put the data in the same place on every node"
    return None


class RayWorker:
    """A process that does one task after the other, and keeps from one to the next what `sharing` keeps."""

    def __init__(self, mailbox: Any) -> None:
        self.mailbox = mailbox

    @cached_property
    def scratch(self) -> Path:
        """A folder for what is not on this node's disk."""
        return Path(tempfile.mkdtemp(prefix="linvit-"))

    def close(self) -> None:
        if "scratch" in vars(self):
            shutil.rmtree(self.scratch, ignore_errors=True)

    def work(self, errand: Errand, name: str, begun: Files | None, *teachers: tuple[str, Files]) -> Record:
        """Do a task: the record of how it ended, and the files of a teacher that was trained. `begun` is what an
        earlier worker left and `teachers` are folders by name, for nodes where the disk is not the driver's."""
        wrong = misfit(errand.source, errand.task.places)
        if wrong is not None:
            return {"kind": "misfit", "text": f"node {platform.node()} of the Ray cluster {wrong}"}

        def send(event: Record) -> None:
            self.mailbox.send.remote(name, event)

        away = not Path(errand.mark).exists()
        store = Store(self.scratch if away else errand.store)
        task = self.unpack(errand.task, store, dict(teachers), away)
        folder = store.work_folder(task.key)
        if away and begun:
            write_files(folder, begun)
        try:
            with mirrored(folder, send) if away else nullcontext():
                ended = attempt(task, store, errand.execute, device="auto", shared=errand.shared, watch=calm(send))
        finally:
            if away:
                shutil.rmtree(folder, ignore_errors=True)
        if away and task.kind == "teacher" and "result" in ended:
            ended["files"] = read_files(store.teacher_folder(task.key))
        return ended

    def unpack(self, task: Task, store: Store, teachers: dict[str, Files], away: bool) -> Task:
        """Lay out the teachers that came along, where this node lacks them; the task, pointing to them."""
        for key in task.needs if away else ():
            write_files(store.teacher_folder(key), teachers[key])
        given = task.places.get("teacher", "")
        if given not in teachers or Path(given).is_dir():
            return task
        folder = self.scratch / "given" / Path(given).name
        write_files(folder, teachers[given])
        return replace(task, places={**task.places, "teacher": str(folder)})


def calm(send: Send) -> Send:
    """Send everything but those records of training that follow too soon on the one before."""
    last = 0.0

    def watch(record: Record) -> None:
        nonlocal last
        if record["kind"] == "train":
            if time.monotonic() - last < QUIET:
                return
            last = time.monotonic()
        send(record)

    return watch
