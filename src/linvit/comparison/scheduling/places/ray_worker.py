"""What happens on a worker of a Ray cluster: one job, and its files there and back where the disk is not the driver's.
Folders (a run's checkpoints, and teachers) travel between machines as their files' bytes.

Ray itself is not needed here: the driver makes actors and remote functions of this.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from linvit.comparison.description.job import Job
from linvit.comparison.scheduling.places.place import Execute, Record, Send, attempt
from linvit.comparison.scheduling.store import Store
from linvit.files import write
from linvit.measurement.record import cpu, source_digest
from linvit.version import __version__

QUIET = 0.5  # seconds between two records of training that are worth sending
EVERY = 2.0  # seconds between two looks for new checkpoints
WEIGHTS = ".safetensors"
GIVEN = ("teacher", "backbone")  # of a job's places: models from elsewhere
Files = dict[str, bytes]  # a folder's content by relative name


@dataclass(frozen=True)
class Errand:
    """A job on its way to a worker. Its `places` are absolute: a worker has a working folder of its own."""

    job: Job
    store: str
    mark: str  # a file in the store: a node that sees it shares the driver's disk
    source: str  # the driver's code
    shared: int
    execute: Execute


def absolute(places: dict[str, str]) -> dict[str, str]:
    """Places on this machine from the root of the file system on; names of sets and models stay as they are."""
    data, root = (places.get(name, "") for name in ("data", "root"))
    found = {"root": Path(root)} if root else {}
    if data not in ("", "digits") and Path(root, data).exists():
        found["data"] = Path(root, data)
    found |= {name: Path(place) for name, place in given_folders(places).items()}
    return {**places, **{name: str(path.resolve()) for name, path in found.items()}}


def given_folders(places: dict[str, str]) -> dict[str, str]:
    """The models from elsewhere that a job needs, those that are folders: they travel with it."""
    return {name: place for name in GIVEN if (place := places.get(name, "")) and Path(place).is_dir()}


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
    """Why jobs cannot be done on this node, in one line; None if they can."""
    here = own_source()
    if here != source:
        return f"runs linvit {here}, the driver {source}: install the same linvit on every node"
    for what in ("data", "root"):
        place = places.get(what, "")
        if place.startswith(os.sep) and not Path(place).exists():
            return f"has no {place}: put the data in the same place on every node"
    return None


class RayWorker:
    """A process that does one job after the other, and keeps from one to the next what `sharing` keeps."""

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
        """Do a job: the record of how it ended, and the files of a teacher that was trained. `begun` is what an
        earlier worker left and `teachers` are folders by name, for nodes where the disk is not the driver's."""
        wrong = misfit(errand.source, errand.job.places)
        if wrong is not None:
            return {"kind": "misfit", "text": f"node {platform.node()} of the Ray cluster {wrong}"}
        last = 0.0

        def send(event: Record) -> None:
            """Not those records of training that follow too soon on the one before."""
            nonlocal last
            if event["kind"] == "train":
                if time.monotonic() - last < QUIET:
                    return
                last = time.monotonic()
            self.mailbox.actor.put_nowait.remote((name, event))

        away = not Path(errand.mark).exists()
        store = Store(self.scratch if away else errand.store)
        job = self.unpack(errand.job, store, dict(teachers), away)
        folder = store.work_folder(job.key)
        if away and begun:
            write_files(folder, begun)
        try:
            with mirrored(folder, send) if away else nullcontext():
                ended = attempt(job, store, errand.execute, device="auto", shared=errand.shared, watch=send)
        finally:
            if away:
                shutil.rmtree(folder, ignore_errors=True)
        if away and job.kind == "teacher" and "result" in ended:
            ended["files"] = read_files(store.teacher_folder(job.key))
        return ended

    def unpack(self, job: Job, store: Store, teachers: dict[str, Files], away: bool) -> Job:
        """Lay out the models that came along, where this node lacks them; the job, pointing to them."""
        for key in job.needs if away else ():
            write_files(store.teacher_folder(key), teachers[key])
        places = dict(job.places)
        for name in GIVEN:
            given = places.get(name, "")
            if given in teachers and not Path(given).is_dir():
                folder = self.scratch / "given" / name / Path(given).name
                write_files(folder, teachers[given])
                places[name] = str(folder)
        return replace(job, places=places)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder, but for those still being written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith("."):
                seen = path.stat()
                found[path.relative_to(folder).as_posix()] = (seen.st_size, seen.st_mtime_ns)
    return found


def read_files(folder: Path, names: list[str] | None = None) -> Files:
    """A folder's files; weights first, so that a log is never older than the checkpoint beside it."""
    found = {}
    for name in sorted(stamps(folder) if names is None else names, key=lambda name: not name.endswith(WEIGHTS)):
        with suppress(FileNotFoundError):
            found[name] = (folder / name).read_bytes()
    return found


def write_files(folder: Path, files: Files) -> None:
    """Put files into a folder, each whole or not at all; weights last."""
    for name in sorted(files, key=lambda name: name.endswith(WEIGHTS)):
        write(folder / name, files[name])


def keep_only(folder: Path, names: list[str]) -> None:
    """Drop the files that the worker has dropped."""
    for name in stamps(folder).keys() - set(names):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def mirrored(folder: Path, send: Send) -> Iterator[None]:
    """Send a run's checkpoints to the driver while it goes, so that they outlive this node."""
    ended = threading.Event()
    sent = stamps(folder)

    def keep_sending() -> None:
        nonlocal sent
        while not ended.wait(EVERY):
            found = stamps(folder)
            new = [name for name in found if sent.get(name) != found[name]]
            if any(name.endswith(WEIGHTS) for name in new):
                send({"kind": "checkpoint", "names": list(found), "files": read_files(folder, new)})
                sent = found

    thread = threading.Thread(target=keep_sending, daemon=True, name="mirror")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
