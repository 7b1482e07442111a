"""`linvit plan` as a user types it. Which layers pay is the machine's to say; what is told of it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Outcome

VIT = (
    *("vit_tiny_patch16_224", "--no-pretrained", "--model-arg", "embed_dim=48", "--model-arg", "depth=2"),
    *("--model-arg", "num_heads=3", "--device", "cpu"),
)
Run = Callable[..., Outcome]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for shade in (40, 200):
        Image.new("RGB", (80, 80), (shade, 90, 10)).save(folder / f"{shade}.png")
    return folder


def test_a_plan_is_told_and_written_and_makes_a_model(
    linvit: Run, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    asked = ("plan", *VIT, "--size", "96", "--plan", "stella,relu_linear", "--data", "photos", "--points", "2")
    outcome = linvit(*asked, "-o", "plan.json", "--plot", "front.png")
    assert outcome.code == 0, outcome.err
    assert "◀ chosen" in outcome.out and "96×96, batch 1, fp32, eager" in outcome.out and "2 images" in outcome.out
    said = " ".join(outcome.out.split())
    assert "linvit convert vit_tiny_patch16_224 --size 96 --plan plan.json -o DIR makes it" in said
    assert Path("front.png").stat().st_size > 1000 and json.loads(Path("plan.json").read_text())["name"] == "auto"
    made = linvit("convert", *VIT, "--size", "96", "--plan", "plan.json", "--dry-run", "--json")
    assert made.code == 0 and len(made.json["layers"]) == 2
    told = linvit(*asked, "--json").json
    assert told["study"]["images"] == 2 and len(told["study"]["layers"][0]["options"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", "90"), "90×90 pixels cannot be cut into patches of 16"),
        (("--keep", "3"), "cannot keep 3 layers: the model has 2"),
        (("--size", "96", "--speedup", "99"), "no plan of these candidates reaches 99× faster"),
        (("--speedup", "2", "--budget-ms", "1"), "both say how fast"),
        (("--plan", "mixa"), "mixa gives different layers different mechanisms"),
        (("--drop", "relative_bias"), "drop names relative_bias, which no layer of this VisionTransformer has"),
        (("--data", "nowhere"), "nowhere is no folder of images"),
        (("-o", "plan.txt"), "a plan is a .json file"),
    ],
)
def test_mistakes_are_one_line(linvit: Run, options: tuple[str, ...], message: str) -> None:
    outcome = linvit("plan", *VIT, *(() if "--plan" in options else ("--plan", "stella")), *options)
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.strip().splitlines()) == 1
