"""The bench measures what is right, keeps what it measured, and prints no speed for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from linvit import clock
from linvit.errors import LinvitError
from linvit.measurement import record, speed
from linvit.measurement.model_speed import compare_models
from linvit.measurement.speed import compare_op

CPU = torch.device("cpu")
SHAPE = speed.OpShape(2, 2, 8, 49)


def rows(make: Callable[..., Any] = speed.implementations, **changes: Any) -> list[dict[str, Any]]:
    settings = {"dtype": "fp32", "device": CPU, "compared": ("ours", "sdpa", "reference"), "budget": 0.005, **changes}
    return list(speed.sweep("stella", [SHAPE], make=make, **settings))


@pytest.mark.parametrize("mechanism", ["stella", "softmax", "relu_quadratic", "qt", "relu_linear"])
def test_every_row_is_checked_and_timed(mechanism: str) -> None:
    found = list(
        speed.sweep(mechanism, [SHAPE], dtype="fp32", device=CPU, compared=("ours", "sdpa", "reference"), budget=0.005)
    )
    assert [(r["implementation"], r["pass"]) for r in found] == [
        (name, which) for name in ("ours", "sdpa", "reference") for which in speed.PASSES
    ]
    for row in found:
        assert row["status"] == "ok", row
        assert row["errors"].keys() == ({"output"} if row["pass"] == "forward" else {"output", "gradient"})
        assert 0 < row["eager_ms"]["low"] <= row["eager_ms"]["median"] <= row["eager_ms"]["high"]
        out_bytes = SHAPE.elements * 4
        assert row["peak_bytes"] >= (out_bytes if row["pass"] == "forward" else 4 * out_bytes)


def test_a_bias_is_measured_with_its_gradient() -> None:
    shape = replace(SHAPE, bias=True, tokens=81)
    compared = ("ours", "sdpa", "reference")
    found = list(speed.sweep("relu_quadratic", [shape], dtype="fp32", device=CPU, compared=compared, budget=0.005))
    assert len(found) == 6 and all(row["status"] == "ok" and row["bias"] for row in found)
    build = speed.implementations("relu_quadratic", {}, shape, CPU)
    inputs = speed.Inputs.draw(shape, "fp32", CPU, 0)
    gradients = []
    for name in ("ours", "reference"):
        made = build[name]()
        gradients.append(inputs.call(made.attend, "forward+backward", made.parameters)[2])
    assert gradients[0].shape == (1, 2, 81, 81)
    torch.testing.assert_close(*gradients)
    extra = speed.floor_ms(shape, "forward", "bf16", 1e12) - speed.floor_ms(
        replace(shape, bias=False), "forward", "bf16", 1e12
    )
    assert extra == pytest.approx(2 * 81 * 81 * 2 / 1e9)
    with pytest.raises(LinvitError, match="stella cannot honour a bias"):
        list(speed.sweep("stella", [shape], dtype="fp32", device=CPU, compared=("ours",)))


def test_forward_is_evaluation_and_with_backward_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batch's statistics mix is checked on the whole batch, and each row begins from the same running ones."""
    monkeypatch.setattr(speed, "CHECKED_BYTES", 1)
    seen: list[tuple[bool, bool]] = []
    norm = torch.nn.BatchNorm1d.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append((self.training, bool(self.running_mean.any())))
        return norm(self, x)

    monkeypatch.setattr(torch.nn.BatchNorm1d, "forward", forward)
    settings = {"device": CPU, "dtype": "fp32", "compared": ("ours", "reference"), "budget": 0.001}
    for which in speed.PASSES:
        seen.clear()
        found = list(speed.sweep("qt", [SHAPE], passes=(which,), options={"shortcut": True}, **settings))
        assert [row["status"] for row in found] == ["ok", "ok"], found
        assert {training for training, _ in seen} == {which != "forward"} and not seen[0][1]
    turned = speed.PASSES[::-1]
    found = list(speed.sweep("qt", [SHAPE], passes=turned, options={"shortcut": True}, **settings))
    assert [row["status"] for row in found] == ["ok"] * 4, found


@pytest.mark.parametrize("fault", ["output", "gradient", "nan", "crash"])
def test_a_wrong_implementation_gets_no_speed(fault: str) -> None:
    def faulty(*args: Any) -> dict[str, Callable[[], speed.Implementation]]:
        right = speed.implementations(*args)["reference"]()

        def attend(q, k, v, x):
            out = right.attend(q, k, v, x)
            if fault == "crash":
                raise RuntimeError("no such kernel\nand a long story")
            if fault == "nan":
                out = out.clone()
                out[-1, -1, -1] = float("nan")
            return out * 1.01 if fault == "output" else out + 0.1 * (v.sum() - v.sum().detach())

        return {"ours": lambda: replace(right, attend=attend)}

    found = {r["pass"]: r for r in rows(faulty, compared=("ours",))}
    red = found["forward+backward"]
    assert red["status"] == ("failed" if fault == "crash" else "wrong")
    assert "eager_ms" not in red and "peak_bytes" not in red
    assert speed.time_of(red) is None
    assert (found["forward"]["status"] == "ok") == (fault == "gradient")
    json.dumps(found, allow_nan=False)


def test_the_floor_counts_each_byte_once() -> None:
    q_k_v_and_out = 4 * 2 * 2 * 8 * 49 * 2
    assert speed.floor_ms(SHAPE, "forward", "bf16", 1e12) == pytest.approx(q_k_v_and_out / 1e9)
    assert speed.floor_ms(SHAPE, "forward+backward", "bf16", 1e12) == pytest.approx(q_k_v_and_out / 1e9 * 11 / 4)


def test_shapes_come_little_work_first() -> None:
    over = speed.PRESETS["grid"]
    assert len(over) == 3 * 3 * 3 * 8
    assert over[0] == speed.OpShape(1, 3, 16, 196) and over[-1] == speed.OpShape(64, 12, 64, 12544)
    assert speed.OpShape(1, 1, 1, 12545).grid.tokens == 12545


def test_done_rows_are_skipped() -> None:
    done = frozenset(speed.key({**asdict(SHAPE), "implementation": "ours", "pass": which}) for which in speed.PASSES)
    assert {r["implementation"] for r in rows(done=done)} == {"sdpa", "reference"}


def test_peak_memory_on_the_cpu() -> None:
    a = torch.ones(256, 1024)
    assert clock.peak_memory(lambda: (a + 1) * 2, CPU) == pytest.approx(2 * 2**20, rel=1e-3)


def test_timing_and_input_sets() -> None:
    timing = clock.Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)
    assert clock.sets_for(2**40, CPU) == 1 and clock.sets_for(1, CPU) == 4


class TestResultFile:
    head = {"kind": "bench op", "dtype": "fp32"}

    def test_rows_are_on_disk_at_once_and_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "sub" / "result.json"
        file = record.ResultFile(path, self.head, record.environment(CPU))
        file.add({"n": 1})
        assert json.loads(path.read_text())["rows"] == [{"n": 1}]
        with pytest.raises(ValueError):
            file.add({"n": float("nan")})
        assert json.loads(path.read_text())["rows"] == [{"n": 1}]
        assert [p.name for p in path.parent.iterdir()] == ["result.json"]

    def test_resume(self, tmp_path: Path) -> None:
        path = tmp_path / "result.json"
        record.ResultFile(path, self.head, record.environment(CPU)).add({"n": 1})
        file = record.ResultFile(path, self.head, record.environment(CPU), resume=True)
        file.add({"n": 2})
        assert file.finish()["complete"] and record.read_result(path)["rows"] == [{"n": 1}, {"n": 2}]

    def test_never_overwritten_and_never_mixed(self, tmp_path: Path) -> None:
        path = tmp_path / "result.json"
        record.ResultFile(path, self.head, record.environment(CPU)).add({"n": 1})
        with pytest.raises(LinvitError, match="not edited"):
            record.ResultFile(path, self.head, record.environment(CPU))
        with pytest.raises(LinvitError, match="dtype fp32, not bf16"):
            record.ResultFile(path, self.head | {"dtype": "bf16"}, record.environment(CPU), resume=True)
        other = record.environment(CPU) | {"hardware": "another"}
        with pytest.raises(LinvitError, match="hardware"):
            record.ResultFile(path, self.head, other, resume=True)
        path.write_text("{")
        with pytest.raises(LinvitError, match="cannot read"):
            record.read_result(path)


def test_environment_says_where_a_number_comes_from() -> None:
    found = record.environment("cpu", ["linvit", "bench"])
    assert found["command"] == "linvit bench" and found["torch"] == torch.__version__
    assert len(found["source"]) == 16 and found["hardware"] and found["time"].endswith("+00:00")


@pytest.mark.parametrize(
    "word, told",
    [
        ("/home/me/out/a.json", "a.json"),
        ("--output=/home/me/a.json", "--output=a.json"),
        ("runs/a", "runs/a"),
        ("-o", "-o"),
    ],
)
def test_a_command_names_no_folder_of_one_machine(word: str, told: str) -> None:
    assert record.environment("cpu", ["linvit", word])["command"] == f"linvit {told}"


def test_side_by_side_ratios() -> None:
    def row(name: str, ms: float, status: str = "ok") -> dict[str, Any]:
        sizes = {"batch": 1, "heads": 1, "head_dim": 8, "tokens": 16, "pass": "forward"}
        return {**sizes, "implementation": name, "status": status, "eager_ms": {"median": ms}}

    result = {"dtype": "fp32", "bandwidth": 4 * 128 * 4 * 1e3}  # the floor is one millisecond
    (line,) = compare_op(result | {"rows": [row("ours", 2.0), row("sdpa", 6.0), row("compiled", 9.0, "wrong")]})
    assert line["times_floor"] == pytest.approx(2) and line["faster_than"]["sdpa"] == pytest.approx(3)
    assert line["faster_than"]["compiled"] is None and line["faster_than"]["reference"] is None


def test_side_by_side_models() -> None:
    def row(attention: str, speed: float, peak: int) -> dict[str, Any]:
        where = {"resolution": 224, "batch": 8, "pass": "inference", "mode": "eager"}
        return {**where, "attention": attention, "status": "ok", "images_per_second": speed, "peak_bytes": peak}

    (line,) = compare_models({"rows": [row("softmax", 100.0, 200), row("converted", 150.0, 100)]})
    assert line["ratio"] == 1.5 and line["memory_ratio"] == 0.5
