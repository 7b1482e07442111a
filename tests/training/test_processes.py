"""Two processes train as one does on the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import linvit
from linvit.training.logs import read_log
from tests.training.toys import train

ROOT = Path(__file__).parents[2]
SETTINGS = {"optimiser": "sgd", "clip_norm": 0.5, "ema": 0.5, "accumulate": 2, "log_steps": 4}
SCRIPT = f"""
import sys
from pathlib import Path
from linvit.training.processes import close_process_group
from tests.training.toys import train
train(folder=Path(sys.argv[1]), **{SETTINGS})
close_process_group()
"""


def launch(script: Path, *args: str, **variables: str) -> str:
    """What two processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


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
    both = [linvit.load(tmp_path / name / "last").state_dict() for name in ("one", "two")]
    for name, tensor in both[0].items():
        assert torch.allclose(tensor, both[1][name], atol=1e-6), name
    logs = [[r for r in read_log(tmp_path / name) if r["kind"] == "train"] for name in ("one", "two")]
    for ours, theirs in zip(*logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5
        assert abs(ours["gradient_norm"] - theirs["gradient_norm"]) < 1e-4
