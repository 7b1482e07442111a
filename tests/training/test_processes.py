"""Two processes train as one does on the same global batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit.training.checkpoints import resumes_after
from linvit.training.config import Stage
from linvit.training.engine.stopping import Stopped
from linvit.training.logs import read_log
from linvit.training.objectives.alignment import AttentionAlignment
from linvit.training.objectives.teacher import Teacher
from tests.training.test_engine import Disorderly
from tests.training.toys import cross_entropy, same, small_model, train, weights

ROOT = Path(__file__).parents[2]
SETTINGS = {"optimiser": "sgd", "clip_norm": 0.5, "ema": 0.5, "accumulate": 2, "log_steps": 4}


def aligned(folder: Path, parts: int) -> None:
    """Layers that are called one by one, in a model of which the rest does not learn. Errors are relative to the images
    of a part, so a step has as many parts as there are processes in the other run."""
    student = small_model("stella")
    objective = AttentionAlignment(Teacher(small_model()), student)
    stages = (Stage("align", "alignment", epochs=1, trainable="attention"),)
    settings = {"stages": stages, "optimiser": "sgd", "epochs": 1, "lr": 1e-3, "accumulate": parts}
    train(student, folder, objective=objective, **settings)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make of all that follows: one launch, since imports are what takes long."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command += [str(folder / "script.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


SCRIPT = """
import sys
from pathlib import Path
from torch import distributed
from linvit.training.processes import close_process_group
from tests.training import test_processes as parts
folder = Path(sys.argv[1])
for part in (parts.plain, parts.disorderly, parts.mesa, parts.stopped):
    right = part(folder / part.__name__)
    (folder / f"{part.__name__}-{distributed.get_rank()}").write_text(f"{right} {distributed.get_world_size()}")
close_process_group()
"""


def told(both: Path, part: str) -> list[str]:
    return [(both / f"{part}-{rank}").read_text() for rank in range(2)]


def disorderly(folder: Path) -> bool:
    def objective(model: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return cross_entropy(lambda x: Disorderly.apply(model(x)), images, targets)

    _, outcome = train(folder=folder, objective=objective)
    return Disorderly.strict == [True, *[False] * outcome.steps]


def test_two_go_on_without_a_deterministic_algorithm(both: Path, tmp_path: Path) -> None:
    """The backward pass that failed has sent some gradients and not others."""
    assert told(both, "disorderly") == ["True 2", "True 2"]
    train(folder=tmp_path)
    one, two = (linvit.load(folder / "last").state_dict() for folder in (tmp_path, both / "disorderly"))
    assert all(torch.allclose(tensor, two[name], atol=1e-4) for name, tensor in one.items())


class Cut(Exception):
    pass


def mesa(folder: Path) -> bool:
    """Whether a run that was cut and resumed ends as one that was not."""

    def objective(stop: int) -> Any:
        seen: list[int] = []

        def made(model: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
            seen.append(1)
            if len(seen) > stop:
                raise Cut
            return cross_entropy(model, nn.functional.interpolate(images, 32), targets)

        return made

    def run(name: str, stop: int = 99, resume: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        model = timm.create_model("efficientvit_b0", num_classes=4)
        settings = {"ema": 0.5, "mesa": 1.0, "mesa_start": 0, "epochs": 1, "checkpoint_seconds": 0, "models": False}
        try:
            made, _ = train(model, folder / name, objective=objective(stop), resume=resume, evaluate=None, **settings)
        except Cut:
            return []
        return [tensor for one in (made.model, made.state.shown) for tensor in one.parameters()]

    whole = run("whole")
    run("cut", stop=2)
    return all(torch.equal(a, b) for a, b in zip(whole, run("cut", resume=True), strict=True))


def test_two_go_on_with_mesa_and_batch_norm(both: Path) -> None:
    """The average's statistics are in the loss, so processes must agree about them, and a checkpoint must have them.
    And without a GPU two processes are one run, though nobody says that the CPU is meant."""
    assert told(both, "mesa") == ["True 2", "True 2"]


def stopped(folder: Path) -> bool:
    """Whether a run that a signal to one of its processes stopped wrote one checkpoint and goes on as if it was not."""
    settings = {"epochs": 2, "log_steps": 3}
    made, _ = train(folder=folder / "whole", **settings)
    processes, calls = made.processes, 0

    def objective(model: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2 and not processes.first:
            signal.raise_signal(signal.SIGTERM)
        return cross_entropy(model, images, targets)

    try:
        train(folder=folder / "run", objective=objective, **settings)
    except Stopped as stop:
        heard = stop.number
    processes.gather_objects(None)  # the first one writes
    written = [path.name for path in (folder / "run" / "checkpoints").glob("step-*")]
    where = resumes_after(folder / "run")
    made, _ = train(folder=folder / "run", resume=True, **settings)
    again = same(weights(made.model), weights(linvit.load(folder / "whole" / "last")))
    return (heard, len(written), where) == (signal.SIGTERM, 1, 3) and again


def test_two_stop_when_one_is_told_to(both: Path) -> None:
    """After the next line of the log, where they meet anyway."""
    assert told(both, "stopped") == ["True 2", "True 2"]


def plain(folder: Path, parts: int = 1) -> bool:
    train(folder=folder, **SETTINGS)
    aligned(folder / "aligned", parts=parts)
    return True


def test_two_match_one(both: Path, tmp_path: Path) -> None:
    plain(tmp_path, parts=2)
    ones = (tmp_path, both / "plain")
    for last in ("last", "aligned/last"):
        states = [linvit.load(folder / last).state_dict() for folder in ones]
        for name, tensor in states[0].items():
            assert torch.allclose(tensor, states[1][name], atol=1e-6), name
    start = small_model("stella").blocks[0].attn.qkv.weight
    assert not torch.allclose(start, states[0]["blocks.0.attn.qkv.weight"], atol=1e-6), "it has learnt something"
    logs = [[r for r in read_log(folder) if r["kind"] == "train"] for folder in ones]
    for ours, theirs in zip(*logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5
        assert abs(ours["gradient_norm"] - theirs["gradient_norm"]) < 1e-4
