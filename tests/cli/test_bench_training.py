"""`linvit bench training`: a short training of each, a result file, and no speed for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from linvit.tasks.classify.training_speed import make_jpegs
from tests.cli.conftest import Outcome

SMALL = ["--model-arg=img_size=8", "--model-arg=patch_size=4", "--model-arg=depth=1", "--model-arg=embed_dim=24"]
SET = ["--set=batch_size=64", "--set=precision=fp32", "--set=randaugment=none"]


def test_softmax_and_converted_are_trained_and_timed(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    found = linvit("bench", "training", "vit_tiny_patch16_224", *SMALL, *SET, "--steps", "100", "-o", str(file))
    assert found.code == 0 and "softmax" in found.out and "stella" in found.out
    result = json.loads(file.read_text())
    assert result["complete"] and result["recipe"]["batch_size"] == 64 and result["environment"]["source"]
    for row in result["rows"]:
        assert row["status"] == "ok" and row["images_per_second"] > 0 and row["error"] < 1e-5
        assert row["loss"]["last"] < row["loss"]["first"] and row["first_window_seconds"] > 0
    again = linvit("bench", "training", "vit_tiny_patch16_224", *SMALL, *SET, "-o", str(file))
    assert again.code == 2 and "result files are not edited" in again.err


def test_an_interrupted_one_goes_on(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    asked = ["bench", "training", "vit_tiny_patch16_224", *SMALL, *SET, "--steps", "75"]
    assert linvit(*asked, "-o", str(file)).code == 0
    result = json.loads(file.read_text())
    kept = result["rows"][0]
    file.write_text(json.dumps(result | {"rows": [kept], "complete": False}))
    assert linvit(*asked, "--resume", str(file)).code == 0
    result = json.loads(file.read_text())
    assert [row["attention"] for row in result["rows"]] == ["softmax", "stella"] and result["rows"][0] == kept
    assert result["complete"]
    other = linvit(*asked, "--set", "batch_size=32", "--resume", str(file))
    assert other.code == 2 and "was measured with recipe" in other.err


@pytest.mark.parametrize("recipe", ["distil", "fast"])
def test_a_recipe_with_a_teacher_is_timed_with_it(recipe: str, linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    options = [*SMALL, *SET, "--recipe", recipe, "--plan", "qt", "--steps", "75", "-o", str(file)]
    assert linvit("bench", "training", "vit_tiny_patch16_224", *options).code == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:  # labels have a tenth of the loss, the rest is how far the teacher is, which is where it began
        assert row["status"] == "ok" and row["loss"]["first"] < 0.5
        stages = {stage["name"]: stage for stage in row["stages"]}
        assert list(stages) == (["train"] if recipe == "distil" else ["align", "features", "finetune"])
        assert sum(stage["epochs"] for stage in stages.values()) == 20
        longest = stages.get("finetune") or stages["train"]
        assert row["images_per_second"] == longest["images_per_second"]
        stepping = sum(stage["epochs"] * 1437 / stage["images_per_second"] for stage in stages.values())
        solving = row["seconds"] - stepping
        assert (solving > 1e-3) == (recipe == "fast") and abs(solving) < 0.5 * row["seconds"]


def test_each_loader_on_jpegs(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    photos, file = tmp_path / "photos", tmp_path / "speed.json"
    make_jpegs(photos, 20, copies=5, size=(40, 30))
    asked = ["bench", "training", "vit_tiny_patch16_224", *SMALL, *SET, "--loaders", "--data", str(photos)]
    found = linvit(*asked, "--workers", "0", "--device", "cpu", "-o", str(file))
    result = json.loads(file.read_text())
    loaders = ["none: the step alone", "resident", "streamed, decoded on the CPU"]  # a GPU decodes as well
    assert found.code == 0 and all(f"softmax, {name}" in found.out for name in loaders)
    assert [row["loader"] for row in result["rows"]] == loaders and result["steps"] == 75 and result["images"] == 90
    assert all(row["attention"] == "softmax" and row["status"] == "ok" for row in result["rows"])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps", "20"], "too few for a speed"),
        (["--set", "batch_size=4096"], "fewer than one batch"),
        (["--plan", "stela"], "did you mean stella"),
    ],
)
def test_mistakes(linvit: Callable[..., Outcome], tmp_path: Path, options: list[str], message: str) -> None:
    file = str(tmp_path / "speed.json")
    found = linvit("bench", "training", "vit_tiny_patch16_224", *SMALL, *SET, *options, "-o", file)
    assert found.code and message in found.err and len(found.err.strip().splitlines()) == 1
