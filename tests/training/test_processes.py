"""Two processes train as one does on the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import linvit
from linvit.training.config import Stage
from linvit.training.logs import read_log
from linvit.training.objectives.alignment import AttentionAlignment
from linvit.training.objectives.teacher import Teacher
from tests.training.toys import small_model, train

ROOT = Path(__file__).parents[2]
SETTINGS = {"optimiser": "sgd", "clip_norm": 0.5, "ema": 0.5, "accumulate": 2, "log_steps": 4}
SCRIPT = f"""
import sys
from pathlib import Path
from linvit.training.processes import close_process_group
from tests.training.test_processes import aligned
from tests.training.toys import train
train(folder=Path(sys.argv[1]), **{SETTINGS})
aligned(Path(sys.argv[1]) / "aligned", parts=1)
close_process_group()
"""


def aligned(folder: Path, parts: int) -> None:
    """Layers that are called one by one, in a model of which the rest does not learn. Errors are relative to the images
    of a part, so a step has as many parts as there are processes in the other run."""
    student = small_model("stella")
    objective = AttentionAlignment(Teacher(small_model()), student)
    stages = (Stage("align", "alignment", epochs=1, trainable="attention"),)
    settings = {"stages": stages, "optimiser": "sgd", "epochs": 1, "lr": 1e-3, "accumulate": parts}
    train(student, folder, objective=objective, **settings)


def launch(script: Path, *args: str, **variables: str) -> str:
    """What two processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *args]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


DISORDERLY = """
import sys
from pathlib import Path
from linvit.training.processes import close_process_group
from tests.training.test_engine import Disorderly
from tests.training.toys import cross_entropy, train

def objective(model, images, targets):
    return cross_entropy(lambda x: Disorderly.apply(model(x)), images, targets)

made, outcome = train(folder=Path(sys.argv[1]), objective=objective)
print(f"{Disorderly.strict == [True, *[False] * outcome.steps]}\\n", end="")
close_process_group()
"""


def test_two_go_on_without_a_deterministic_algorithm(tmp_path: Path) -> None:
    """The backward pass that failed has sent some gradients and not others."""
    script = tmp_path / "script.py"
    script.write_text(DISORDERLY)
    assert launch(script, str(tmp_path / "run")).splitlines() == ["True", "True"]
    train(folder=tmp_path / "one")
    one, two = (linvit.load(tmp_path / name / "last").state_dict() for name in ("one", "run"))
    assert all(torch.allclose(tensor, two[name], atol=1e-4) for name, tensor in one.items())


MESA = """
import sys, timm, torch
from pathlib import Path
from linvit.training.processes import close_process_group
from tests.training.toys import cross_entropy, train

class Stopped(Exception):
    pass

def objective(stop):
    seen = []
    def made(model, images, targets):
        seen.append(1)
        if len(seen) > stop:
            raise Stopped
        return cross_entropy(model, torch.nn.functional.interpolate(images, 32), targets)
    return made

def run(name, stop=99, resume=False):
    torch.manual_seed(0)
    model = timm.create_model("efficientvit_b0", num_classes=4)
    settings = dict(ema=0.5, mesa=1.0, mesa_start=0, epochs=1, checkpoint_seconds=0, evaluate=None, models=False)
    try:
        made, _ = train(model, Path(sys.argv[1]) / name, objective=objective(stop), resume=resume, **settings)
    except Stopped:
        return None
    return [tensor for one in (made.model, made.state.shown) for tensor in one.parameters()]

whole = run("whole")
run("cut", stop=2)
again = run("cut", resume=True)
equal = all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
print(f"{equal} {torch.distributed.get_world_size()}\\n", end="")
close_process_group()
"""


def test_two_go_on_with_mesa_and_batch_norm(tmp_path: Path) -> None:
    """The average's statistics are in the loss, so processes must agree about them, and a checkpoint must have them.
    And without a GPU two processes are one run, though nobody says that the CPU is meant."""
    script = tmp_path / "script.py"
    script.write_text(MESA)
    assert launch(script, str(tmp_path), CUDA_VISIBLE_DEVICES="").splitlines() == ["True 2", "True 2"]


def test_two_match_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch(script, str(tmp_path / "two"))
    train(folder=tmp_path / "one", **SETTINGS)
    aligned(tmp_path / "one" / "aligned", parts=2)
    for last in ("last", "aligned/last"):
        both = [linvit.load(tmp_path / name / last).state_dict() for name in ("one", "two")]
        for name, tensor in both[0].items():
            assert torch.allclose(tensor, both[1][name], atol=1e-6), name
    start = small_model("stella").blocks[0].attn.qkv.weight
    assert not torch.allclose(start, both[0]["blocks.0.attn.qkv.weight"], atol=1e-6), "it has learnt something"
    logs = [[r for r in read_log(tmp_path / name) if r["kind"] == "train"] for name in ("one", "two")]
    for ours, theirs in zip(*logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5
        assert abs(ours["gradient_norm"] - theirs["gradient_norm"]) < 1e-4
