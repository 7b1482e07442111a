"""The process in which an exported file is opened anew, and what it is asked: its answers, its times, its memory."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.models.dense import DenseModel, Target

SCRIPT = Path(__file__).with_name("opened.py")

# With every `free` glibc gives large blocks back to the system, and PyTorch takes them anew in every call, page by
# page: a small model then spends a third of its time there, and how long depends on the process.
KEEP_MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"


class Process:
    """A file, opened by its runtime in a process of its own. `layers` are tensors inside that are wanted too."""

    def __init__(self, path: Path, *, threads: int = 0, layers: Sequence[str] = (), how: str = "") -> None:
        self.path = path
        threads = threads or torch.get_num_threads()
        told = json.dumps({"path": str(path), "threads": threads, "layers": list(layers), "how": how})
        source = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
        environment = {
            "GLIBC_TUNABLES": KEEP_MEMORY, **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)
        }  # fmt: skip
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        # -P: the script's own folder must not hide the packages its files are named after.
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(SCRIPT), told],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment,
        )  # fmt: skip
        try:
            self.opened, _ = self.answer()
        except BaseException:
            self.close()
            raise

    def photographs(
        self, pictures: Sequence[np.ndarray], size: tuple[int, int] | None = None, *, together: bool = False
    ) -> list[np.ndarray]:
        """The outputs for photographs, which the other process prepares as the JSON beside the file says: one by one,
        or `together` in a batch."""
        return self.ask("photographs", pictures, size=size, together=together)[1]

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        return self.ask("run", [images])[1]

    def timed(self, images: np.ndarray, calls: int) -> dict[str, Any]:
        """Of each of so many calls the `seconds` it took and the `cpu_seconds` of all threads, and `peak_bytes`, the
        process's peak memory since before it opened the file."""
        return self.ask("time", [images], calls=calls)[0]

    def ask(self, what: str, arrays: Sequence[np.ndarray], **more: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
        packed = io.BytesIO()
        np.savez(packed, *arrays)
        question = json.dumps({"ask": what, "bytes": packed.tell(), **more}).encode() + b"\n"
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # why is in the answer
            self.child.stdin.write(question + packed.getvalue())
            self.child.stdin.flush()
        return self.answer()

    def answer(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            self.child.wait()
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise LinvitError(
                f"{self.path.name} broke its runtime off (code {self.child.returncode}): {' '.join(last)}"
            )
        answer = json.loads(line)
        packed = self.child.stdout.read(answer["bytes"])
        if "error" in answer:
            raise LinvitError(f"{self.path.name} cannot be run: {answer['error']}")
        with np.load(io.BytesIO(packed), allow_pickle=False) as held:
            return answer, [held[f"arr_{place}"] for place in range(len(held.files))]

    def close(self) -> None:
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.child.wait()
        self.errors.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessModel(nn.Module):
    """An exported file as a model, for whoever measures models; with the classes, the size and the preprocessing of the
    one it was made of."""

    def __init__(
        self, process: Process, original: Any, how: dict[str, Any], size: tuple[int, int], *, one_by_one: bool
    ) -> None:
        super().__init__()
        self.process, self.one_by_one = process, one_by_one
        self.num_classes: Any = getattr(original, "num_classes", None)
        noted = getattr(original, "pretrained_cfg", None) or {}
        self.pretrained_cfg = self.default_cfg = {**noted, **how, "input_size": (len(how["mean"]), *size)}

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Tensor:
        parts = images.split(1 if self.one_by_one else len(images))
        return torch.cat([torch.from_numpy(self.process.run(part.contiguous().numpy())[0]) for part in parts])


class ProcessSegmenter(ProcessModel, DenseModel):
    """An exported segmenter, for images that are brought to its size without padding."""

    task = "segment"
