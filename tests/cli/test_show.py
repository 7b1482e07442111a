"""Pictures of models and of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Outcome
from tests.training.test_masks import castled
from tests.training.toys import train


def test_show_masks(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    train(castled(), tmp_path / "run", epochs=1)
    outcome = linvit("show", "masks", str(tmp_path / "run"), "-o", str(tmp_path / "masks.png"), "--json")
    assert outcome.code == 0 and outcome.json["steps"] == 4
    assert (tmp_path / "masks.png").stat().st_size > 1000
    assert "blocks.1.attn" in linvit("show", "masks", str(tmp_path / "run")).out
    assert (tmp_path / "run" / "masks.png").exists()


@pytest.mark.parametrize("what", ["missing", "no masks", "bad picture"])
def test_show_masks_mistakes(linvit: Callable[..., Outcome], tmp_path: Path, what: str) -> None:
    args = ["show", "masks", str(tmp_path)]
    if what != "missing":
        (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\n')
    if what == "bad picture":
        args += ["-o", str(tmp_path / "x.gif")]
    outcome = linvit(*args)
    words = {"missing": "holds no log.jsonl", "no masks": "logged no masks", "bad picture": "unknown picture format"}
    assert outcome.code == 2 and outcome.err.startswith("error:") and words[what] in outcome.err
    assert outcome.err.count("\n") == 1


MODEL = ("deit_tiny_patch16_224", "--no-pretrained", "--model-arg", "depth=2", "--size", "64")


@pytest.fixture
def photo(tmp_path: Path) -> str:
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png")


def test_show_maps(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    name, *options = MODEL
    line = ["show", "maps", name, photo, *options, "--plan", "stella,mobile", "-o", str(tmp_path / "maps.svg")]
    outcome = linvit(*line, "--at", "60,45", "--json")
    assert outcome.code == 0, outcome.err
    layers = outcome.json["layers"]
    assert list(layers) == ["softmax", "stella", "mobile"] and [row["layer"] for row in layers["stella"]] == [0, 1]
    assert 0 < layers["stella"][0]["total_variation"] < 1 and "total_variation" not in layers["softmax"][0]
    assert (tmp_path / "maps.svg").read_text().startswith("<?xml")
    told = linvit(*line, "--token", "class", "--layer", "0,1", "--head", "all")
    assert told.code == 0 and "blocks.1.attn" in told.out and "variation" in told.out
    assert linvit(*line, "--rollout", "--pooled").code == 0


def test_a_papers_figure(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    name, *options = MODEL
    for figure, last in (("qtvit", "qt"), ("castling", "castling"), ("mobile", "mobile")):
        line = ["show", "maps", name, photo, *options, "--figure", figure, "-o", str(tmp_path / "figure.png"), "--json"]
        outcome = linvit(*line)
        assert outcome.code == 0 and list(outcome.json["layers"])[-1] == last


def test_show_features(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    name, *options = MODEL
    line = ["show", "features", name, photo, *options, "--plan", "stella", "-o", str(tmp_path / "features.png")]
    outcome = linvit(*line, "--json")
    assert outcome.code == 0 and outcome.json["similarity"]["softmax"] == pytest.approx(1.0)
    assert outcome.json["layer"] == "blocks.1.attn" and "stella" in linvit(*line, "--at", "60,45").out


def test_saved_models_stand_beside(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    name, *options = MODEL
    saved = str(tmp_path / "converted")
    assert linvit("convert", name, *options, "--plan", "castling", "-o", saved).code == 0
    line = ["show", "maps", name, photo, *options, "--with", saved, "-o", str(tmp_path / "maps.png"), "--json"]
    outcome = linvit(*line)
    assert outcome.code == 0 and list(outcome.json["layers"]) == ["softmax", "converted"]
    assert "output norm" in outcome.json["notes"]["converted"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--at", "5,400"], "5,400 is outside of what the model sees of noise"),
        (["--at", "here"], "expected a pixel such as 120,80"),
        (["--at", "60,45", "--pooled"], "give one of them"),
        (["--token", "mask"], "unknown token 'mask'"),
        (["--layer", "7"], "there is no layer 7: the model has 0 to 1"),
        (["--layer", "blocks.9.attn"], "unknown layer 'blocks.9.attn'; did you mean"),
        (["--head", "5"], "there is no head 5"),
        (["--figure", "mixa"], "unknown figure 'mixa'"),
        (["--plan", "stela"], "stella"),
        (["-o", "maps.gif"], "unknown picture format"),
    ],
)
def test_show_maps_mistakes(linvit: Callable[..., Outcome], photo: str, options: list[str], words: str) -> None:
    name, *rest = MODEL
    outcome = linvit("show", "maps", name, photo, *rest, *options)
    assert outcome.code == 2 and outcome.err.startswith("error:") and words in outcome.err, outcome.err
    assert outcome.err.count("\n") == 1


def test_show_what_is_no_photograph_or_model(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    text = tmp_path / "text.png"
    text.write_text("words")
    name, *rest = MODEL
    for line, words in (
        ([name, str(text), *rest], "cannot read image"),
        ([name, str(tmp_path / "gone.png"), *rest], "there is no image"),
        (["deit_tinny_patch16_224", photo], "unknown model 'deit_tinny_patch16_224'; did you mean"),
        (["resnet18", photo, "--no-pretrained"], "has no attention"),
    ):
        for verb in ("maps", "features"):
            outcome = linvit("show", verb, *line, "-o", str(tmp_path / "x.png"))
            assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1, outcome.err


def test_show_kernels(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = linvit("show", "kernels", "-o", str(tmp_path / "kernels.png"), "--head-dim", "8", "--json")
    exact = outcome.json["angle"]["angular, exact"]
    assert outcome.code == 0 and exact["mean"][45] == pytest.approx(0.5, abs=1e-3) and exact["x"][45] == 90
    assert "Taylor 2" in linvit("show", "kernels", "-o", str(tmp_path / "kernels.png")).out


def test_show_sensitivity(linvit: Callable[..., Outcome], tmp_path: Path, photo: str) -> None:
    name, *rest = MODEL
    line = ["show", "sensitivity", name, str(tmp_path), *rest, "-o", str(tmp_path / "layers.svg")]
    outcome = linvit(*line, "--json")
    assert outcome.code == 0 and [layer["index"] for layer in outcome.json["layers"]] == [0, 1]
    assert "blocks.1.attn" in linvit(*line, "--keep", "1").out


def test_show_pareto(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    store = Path(__file__).parents[2] / "benchmarks" / "stores" / "imagenette.tar.xz"
    outcome = linvit("show", "pareto", str(store), "-o", str(tmp_path / "pareto.png"), "--json")
    assert outcome.code == 0
    points = {point["name"]: point for point in outcome.json["settings"][0]["candidates"]}
    front = [point for point in points.values() if point["front"]]
    assert points["softmax"]["x"] == 1.0 and "stella" in {point["name"] for point in front}
    for point in points.values():
        beaten = any(other["x"] > point["x"] and other["score"] > point["score"] for other in points.values())
        assert point["front"] != beaten
    assert linvit("show", "pareto", str(tmp_path / "gone"), "-o", str(tmp_path / "pareto.png")).code == 2
