"""Killed at any step, a run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import linvit
from linvit.errors import LinvitError
from linvit.training.callbacks import Masks
from linvit.training.checkpoints import checksum, read, write
from linvit.training.config import Stage
from linvit.training.engine.loop import Diverged
from linvit.training.engine.step import Stepper
from linvit.training.logs import LOG, read_log
from tests.training.toys import callback, cross_entropy, engine, same, small_model, train, weights

ROOT = Path(__file__).parents[2]
STAGES = (Stage("one", epochs=1, trainable="attention"), Stage("two", epochs=2, lr=5e-3))
# Everything that has a state: dropping, two stages, accumulation, the average, a mask that is annealed.
RICH: dict[str, Any] = {"ema": 0.9, "accumulate": 2, "stages": STAGES, "log_steps": 1, "checkpoint_seconds": 0}


def rich_model() -> nn.Module:
    model = small_model(drop_path_rate=0.3, proj_drop_rate=0.1)
    linvit.convert(model, "castling", size=(8, 8), threshold=0.1)  # 4/N keeps nothing of 5 tokens
    return model


class Killed(Exception):
    pass


def dying(after: int) -> Any:
    """An objective that ends the run at its so-manieth call."""
    calls = 0

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return cross_entropy(model, images, targets)

    return objective


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """An uninterrupted run: its folder, weights and average."""
    folder = tmp_path_factory.mktemp("whole")
    made, _ = train(rich_model(), folder, **RICH)
    assert callback(made, Masks) is not None and made.state.shown is not made.model
    return folder, weights(made.model), weights(made.state.shown)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 9, 11])
def test_resume_equals_uninterrupted(whole: Any, tmp_path: Path, step: int) -> None:
    with pytest.raises(Killed):
        train(rich_model(), tmp_path, objective=dying(2 * step + 1), **RICH)
    made, outcome = train(rich_model(), tmp_path, resume=True, **RICH)
    folder, trained, average = whole
    assert outcome.steps == 12
    assert same(weights(made.model), trained) and same(weights(made.state.shown), average)
    assert same(weights(linvit.load(tmp_path / "best")), weights(linvit.load(folder / "best")))
    logged = []
    for run in (folder, tmp_path):
        records = [record for record in read_log(run) if record["kind"] == "train"]
        logged.append([(record["step"], record["loss"], record["kept"]) for record in records])
    assert logged[0] == logged[1]


@pytest.mark.parametrize("step", [3, 5, 9])  # inside a stage, so that the optimiser has a state to go on with
def test_resume_with_muon(tmp_path: Path, step: int) -> None:
    settings = {**RICH, "optimiser": "muon"}
    whole, _ = train(rich_model(), tmp_path / "whole", **settings)
    with pytest.raises(Killed):
        train(rich_model(), tmp_path / "part", objective=dying(2 * step + 1), **settings)
    made, _ = train(rich_model(), tmp_path / "part", resume=True, **settings)
    assert same(weights(made.model), weights(whole.model))


SCRIPT = """
import sys
from pathlib import Path
from tests.training.test_checkpoints import RICH, rich_model
from tests.training.toys import callback, cross_entropy, train
import time

def slow(*args):
    time.sleep(0.02)
    return cross_entropy(*args)

train(rich_model(), Path(sys.argv[1]), objective=slow, resume=True, **RICH)
"""


def test_kill_9_at_a_random_step(whole: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})
    lines = random.randint(1, 14)  # a random step and a random moment in it
    try:
        while process.poll() is None:
            log = tmp_path / LOG
            if log.exists() and len(log.read_text().splitlines()) >= lines:
                time.sleep(random.uniform(0, 0.1))
                process.kill()
                break
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    made, _ = train(rich_model(), tmp_path, resume=True, **RICH)
    assert same(weights(made.model), whole[1]) and same(weights(made.state.shown), whole[2])


def interrupted(folder: Path) -> list[Path]:
    with pytest.raises(Killed):
        train(rich_model(), folder, objective=dying(13), **RICH)
    return sorted((folder / "checkpoints").glob("step-*"))


def test_a_truncated_checkpoint_falls_back(whole: Any, tmp_path: Path) -> None:
    _, last = interrupted(tmp_path)
    last.write_bytes(last.read_bytes()[:-100])
    notes: list[dict[str, Any]] = []
    made, _ = train(rich_model(), tmp_path, resume=True, watch=notes.append, **RICH)
    texts = [note["text"] for note in notes if note["kind"] == "note"]
    assert f"the checkpoint {last} is damaged" in texts[0] and "trying the one before" in texts[0]
    assert "resumed after step 5 of 12" in texts[1]
    assert same(weights(made.model), whole[1])


def test_a_foreign_checkpoint_falls_back(whole: Any, tmp_path: Path) -> None:
    _, last = interrupted(tmp_path)
    tensors, _ = read(last)
    odd = {"linvit": '{"checksum": 1}'}
    for foreign in (
        lambda: safetensors.torch.save_file(tensors, last),
        lambda: safetensors.torch.save_file(tensors, last, odd),
        lambda: last.write_text("hello"),
    ):
        foreign()
        made = engine(rich_model(), tmp_path, **RICH)
        notes: list[str] = []
        found = made.state.restore(notes.append)
        assert found is not None and found[1]["step"] == 5
        assert len(notes) == 1 and str(last) in notes[0]


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    _, last = interrupted(tmp_path)
    data = bytearray(last.read_bytes())
    data[-50] ^= 4
    last.write_bytes(data)
    with pytest.raises(LinvitError, match="its checksum is wrong"):
        read(last)


def header_of(path: Path) -> int:
    """Where the header of a safetensors file ends."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_changed_state_falls_back_with_a_line(whole: Any, tmp_path: Path) -> None:
    _, last = interrupted(tmp_path)
    content = last.read_bytes()
    assert content.count(b'\\"step\\": 6') >= 1
    last.write_bytes(content.replace(b'\\"step\\": 6', b'\\"step\\": 9'))
    notes: list[dict[str, Any]] = []
    made, _ = train(rich_model(), tmp_path, resume=True, watch=notes.append, **RICH)
    texts = [note["text"] for note in notes if note["kind"] == "note"]
    assert f"the checkpoint {last} is damaged: its checksum is wrong; trying the one before" in texts[0]
    assert "resumed after step 5 of 12" in texts[1] and same(weights(made.model), whole[1])


def test_any_flipped_bit_of_a_header_is_noticed(tmp_path: Path) -> None:
    _, last = interrupted(tmp_path)
    content, chance = last.read_bytes(), random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        damaged[chance.randrange(header_of(last))] ^= 1 << chance.randrange(7)
        copied = tmp_path / "copied.safetensors"
        copied.write_bytes(damaged)
        with pytest.raises(LinvitError, match=r"copied.safetensors"):
            read(copied)


def test_checkpoints_of_the_first_format_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3)}
    old = {"step": 4, "format": 1, "checksum": checksum(tensors)}
    safetensors.torch.save_file(tensors, tmp_path / "old.safetensors", {"linvit": json.dumps(old)})
    assert read(tmp_path / "old.safetensors")[1]["step"] == 4


def test_another_run_may_not_go_on(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with pytest.raises(LinvitError, match="holds a run: --resume goes on with it"):
        train(rich_model(), tmp_path, **RICH)
    notes: list[str] = []
    with pytest.raises(LinvitError, match=r"no checkpoint can be used: .* belongs to another run"):
        engine(rich_model(), tmp_path, **{**RICH, "lr": 1.0}).state.restore(notes.append)
    assert "belongs to another run" in notes[0]


def test_two_checkpoints_are_kept_and_nothing_else(whole: Any) -> None:
    names = sorted(path.name for path in (whole[0] / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-00000011.safetensors", "step-00000012.safetensors"]


def test_a_finished_run_resumes_to_its_end(whole: Any) -> None:
    """And says again what it measured last, which it does not measure again."""
    measured = [record for record in read_log(whole[0]) if record["kind"] == "eval"]
    with open(whole[0] / "log.jsonl", "ab") as file:
        file.write(b"\xff\xfe no line of ours\n")
    made, outcome = train(rich_model(), whole[0], resume=True, **RICH)
    assert outcome.steps == 12 and same(weights(made.model), whole[1])
    assert outcome.last["top1"] == measured[-1]["top1"]
    assert [record for record in read_log(whole[0]) if record["kind"] == "eval"] == measured


def test_every_step_of_the_masks_is_logged_after_a_resume(tmp_path: Path) -> None:
    settings = {**RICH, "log_steps": 4}
    with pytest.raises(Killed):
        train(rich_model(), tmp_path, objective=dying(13), **settings)  # in the seventh step, of two parts each
    train(rich_model(), tmp_path, resume=True, **settings)
    kept = [record["kept"] for record in read_log(tmp_path) if record["kind"] == "train"]
    steps = [part["first_step"] + i for part in kept for i in range(len(part["share"]))]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) == 12


def test_weights_that_are_nan_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(small_model(), tmp_path, checkpoint_seconds=0, epochs=1)
    take = Stepper.take

    def poison(*args: Any) -> None:
        take(*args)
        if made.step == made.steps - 1:
            with torch.no_grad():
                made.model.blocks[0].attn.qkv.bias[0] = torch.nan

    monkeypatch.setattr(Stepper, "take", poison)
    with pytest.raises(Diverged, match=r"in step 4: it began in the weights, beginning with blocks.0.attn.qkv.bias"):
        made.run()
    assert not (tmp_path / "checkpoints" / "step-00000004.safetensors").exists()
    assert (tmp_path / "checkpoints" / "step-00000003.safetensors").exists() and not (tmp_path / "last").exists()


@pytest.mark.parametrize("optimiser", ["adamw", "muon", "sgd"])
def test_moments_lie_as_their_weights_do(tmp_path: Path, optimiser: str) -> None:
    """Fused steps walk a weight and its moments side by side, so they must have the same layout after a resume."""

    def pictures() -> nn.Module:
        torch.manual_seed(3)
        made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
        return made.to(memory_format=torch.channels_last)

    settings: dict[str, Any] = {"optimiser": optimiser, "checkpoint_seconds": 0, "evaluate": None, "models": False}
    whole, _ = train(pictures(), **settings)
    with pytest.raises(Killed):
        train(pictures(), tmp_path, objective=dying(5), **settings)
    resumed, _ = train(pictures(), tmp_path, resume=True, **settings)
    assert same(weights(whole.model), weights(resumed.model))


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    one = torch.randn(4, 3)
    write(tmp_path / "x.safetensors", {"a": one, "b": one, "c": one[:2]}, {})
    tensors, _ = read(tmp_path / "x.safetensors")
    assert torch.equal(tensors["a"], one) and torch.equal(tensors["b"], one) and torch.equal(tensors["c"], one[:2])


def test_a_converted_model_may_not_go_on_with_another_mechanism(tmp_path: Path) -> None:
    train(small_model("stella"), tmp_path, checkpoint_seconds=0, epochs=1)
    with pytest.raises(LinvitError, match="belongs to another run"):
        train(small_model("relu_linear"), tmp_path, checkpoint_seconds=0, epochs=1, resume=True)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".writing-x").write_bytes(b"half")
    train(folder=tmp_path, epochs=1)
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))
