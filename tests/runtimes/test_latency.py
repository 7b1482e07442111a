"""`bench edge`: rows by turns, resumed in part, and `auto` that is never slower than the original."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import linvit
from linvit.runtimes import latency


class Clock:
    """A process whose calls take as long as it is told."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def timed(self, images: Any, calls: int) -> dict[str, Any]:
        return {"seconds": [self.seconds] * calls, "cpu_seconds": [self.seconds] * calls, "peak_bytes": 1}


class Here:
    """A process that is none: the folder's model in this one."""

    def __init__(self, path: Path, **_: Any) -> None:
        self.model = linvit.load(path).eval()

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            return [self.model(torch.from_numpy(images)).numpy()]

    def timed(self, images: Any, calls: int) -> dict[str, Any]:
        return Clock(0.5).timed(images, calls)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("seconds", "left"), [(0.009, False), (0.0099, True), (0.02, True)])
def test_auto_that_is_not_faster_in_a_runtime_leaves_the_model_as_it_is(seconds: float, left: bool) -> None:
    names = [latency.ORIGINAL, "auto:candidates=stella", "stella"]
    opened: Any = [
        ({"attention": name, "threads": 1}, Clock(t)) for name, t in zip(names, (0.01, seconds, 0.02), strict=True)
    ]
    latency.fill_times(opened, np.zeros(1), 0.001)
    original, auto, stella = (row for row, _ in opened)
    assert auto["attention"] == names[1] and ("same_as" in auto) == left and "same_as" not in stella
    assert auto["ms"]["p50"] == pytest.approx(original["ms"]["p50"] if left else 1e3 * seconds)
    assert auto["ratio"] == pytest.approx(1 if left else 0.01 / seconds) and stella["ratio"] == pytest.approx(0.5)


def test_rows_of_a_group_that_was_left_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "Process", Here)
    converts = {"stella": partial(linvit.convert, plan="stella")}
    given: dict[str, Any] = {"sizes": [(160, 160)], "threads": [1], "runtimes": ("eager",), "args": {}}
    rows = list(latency.sweep("test_vit", converts, **given, budget=0.01, files=tmp_path / "kept"))
    assert [row["attention"] for row in rows] == ["original", "stella"]
    assert all(row["status"] == "ok" and row["ratio"] == 1 for row in rows)
    layers = rows[0]["layers"]
    assert [layer["name"] for layer in layers["attention"]] == [f"blocks.{i}.attn" for i in range(6)]
    assert 0 < layers["attention"][0]["mechanism_ms"] < layers["attention"][0]["ms"] < layers["model_ms"]
    kept = sorted((tmp_path / "kept").iterdir())
    done = frozenset(latency.key(row) for row in rows[:1])
    again = list(latency.sweep("test_vit", converts, **given, done=done, budget=0.01, files=tmp_path / "kept"))
    assert [row["attention"] for row in again] == ["stella"] and again[0]["ratio"] == 1
    assert set(kept) <= set((tmp_path / "kept").iterdir())
    assert not list(latency.sweep("test_vit", converts, **given, done=frozenset(map(latency.key, rows))))


def test_a_model_whose_saving_was_killed_is_saved_again(tmp_path: Path) -> None:
    row, model = {"runtime": "eager", "attention": "original", "resolution": 160}, timm.create_model("test_vit")
    folder = latency.write(model, row, (160, 160), tmp_path)
    (folder / "config.json").unlink()
    assert latency.write(model, row, (160, 160), tmp_path) == folder and (folder / "config.json").exists()


def test_biases_are_not_left_out_because_they_are_zero() -> None:
    model = timm.create_model("test_vit")
    latency.fill_vectors(model)
    assert all(bool((p != 0).all() and (p != 1).all()) for p in model.parameters() if p.ndim == 1)


def test_a_model_of_any_size_is_exported_at_the_size_that_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pyramids are not built for a size, and their own would be exported otherwise."""
    asked = []
    monkeypatch.setattr(latency, "export", lambda model, to, path, size, count: asked.append((size, path.suffix)))
    row = {"runtime": "onnx", "attention": "original", "resolution": "64x96"}
    latency.write(timm.create_model("pvt_v2_b0", num_classes=2), row, (64, 96), tmp_path)
    assert asked == [((64, 96), ".onnx")]
