"""`linvit eval` measures what the run measured: the same images, the same classes, the same crop and size."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linvit.training.logs import read_log
from tests.cli.conftest import Outcome

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
MODEL = ["vit_tiny_patch16_224", "--no-pretrained", *(f"--model-arg={key}={value}" for key, value in SHAPE.items())]
# fmt: off
QUICK = ["--recipe=deit", "--device=cpu", "--set=precision=fp32", "--set=randaugment=none", "--set=batch_size=4",
         "--set=epochs=8", "--set=lr=1e-3", "--set=warmup_epochs=0", "--set=mixup=0", "--set=cutmix=0"]
# fmt: on
Linvit = Callable[..., Outcome]


def photos(path: Path, *splits: str, each: int = 20, classes: str = "abc", side: int = 12) -> Path:
    """An image folder, each class of its own brightness."""
    draw = np.random.default_rng(0)
    for split in splits or ("",):
        for place, name in enumerate(classes):
            (path / split / name).mkdir(parents=True)
            for index in range(each):
                pixels = draw.integers(0, 90, (side, side, 3), dtype=np.uint8) + np.uint8(80 * place)
                Image.fromarray(pixels).save(path / split / name / f"{index}.png")
    return path


def train(linvit: Linvit, data: Path, run: Path, *args: str) -> dict[str, Any]:
    """A short run: the last numbers that it logged."""
    outcome = linvit("train", *MODEL, f"--data={data}", *QUICK, *args, "-o", str(run))
    assert outcome.code == 0, outcome.err
    return [record for record in read_log(run) if record["kind"] == "eval"][-1]


def measure(linvit: Linvit, model: Path, data: Path, *args: str) -> dict[str, Any]:
    outcome = linvit("eval", str(model), f"--data={data}", "--device=cpu", "--json", *args)
    assert outcome.code == 0, outcome.err
    return outcome.json


def same(found: dict[str, Any], logged: dict[str, Any]) -> bool:
    return found["top1"] == logged["top1"] and found["loss"] == pytest.approx(logged["loss"], rel=1e-5)


def test_of_a_set_without_splits_what_was_held_out(linvit: Linvit, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    packed = tmp_path / "photos.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(folder, "photos")
    logged = train(linvit, folder, tmp_path / "run")
    for data in (folder, packed):
        found = measure(linvit, tmp_path / "run" / "last", data)
        assert found["images"] == 6 and same(found, logged)
        assert measure(linvit, tmp_path / "run" / "last", data, "--split=train")["images"] == 54
        assert measure(linvit, tmp_path / "run" / "last", data, "--split=all")["images"] == 60
        note = linvit("eval", str(tmp_path / "run" / "last"), f"--data={data}", "--device=cpu").err
        assert "has no splits: 6 of its 60 images are held out for validation" in note
    shutil.copytree(tmp_path / "run" / "last", tmp_path / "else")
    assert measure(linvit, tmp_path / "else", folder)["images"] == 6, "a model knows it wherever it lies"
    assert linvit("convert", str(tmp_path / "else"), "--plan=stella", "-o", str(tmp_path / "converted")).code == 0
    assert measure(linvit, tmp_path / "converted", folder)["images"] == 6, "and whatever became of it"


def test_of_a_set_without_splits_all_that_nobody_trained_on(linvit: Linvit, tmp_path: Path) -> None:
    """Though it has as many images as the set with splits that the model is from."""
    divided = photos(tmp_path / "divided", "train", "val")
    train(linvit, divided, tmp_path / "run")
    count = len(list(divided.rglob("*.png")))
    folder = tmp_path / "photos"
    for file in divided.rglob("*.png"):
        to = folder / file.parent.name / f"{file.parent.parent.name}{file.name}"
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    found = linvit("eval", str(tmp_path / "run" / "last"), f"--data={folder}", "--device=cpu", "--json")
    assert found.json["images"] == count and f"has no splits: all {count} images are measured" in found.err


@pytest.mark.parametrize(
    "args", [["--set=test_crop=0.5"], ["--model-arg=dynamic_img_size=true", "--size=12", "--set=ema=0.9"]]
)
def test_crop_and_size_are_the_run_s(linvit: Linvit, tmp_path: Path, args: list[str]) -> None:
    data = photos(tmp_path / "photos", "train", "val")
    logged = train(linvit, data, tmp_path / "run", *args)
    for name in ("last", "best"):
        config = json.loads((tmp_path / "run" / name / "config.json").read_text())["preprocessing"]
        assert config["input_size"] == ([3, 12, 12] if "--size=12" in args else [3, 8, 8])
        assert config["crop_pct"] == (0.5 if "--set=test_crop=0.5" in args else 0.9)
    assert same(measure(linvit, tmp_path / "run" / "last", data), logged)


def test_classes_are_matched_by_name(linvit: Linvit, tmp_path: Path) -> None:
    data = photos(tmp_path / "photos", "train", "val")
    train(linvit, data, tmp_path / "run")
    last = tmp_path / "run" / "last"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["classes"] == ["a", "b", "c"]
    assert json.loads((last / "config.json").read_text())["classes"] == ["a", "b", "c"]
    whole = measure(linvit, last, data)["per_class"]
    assert max(whole["b"], whole["c"]) > 0

    shutil.rmtree(data / "val" / "a")
    found = measure(linvit, last, data)
    assert found["per_class"] == {name: whole[name] for name in "bc"}
    assert found["top1"] == pytest.approx((whole["b"] + whole["c"]) / 2)

    shutil.rmtree(data / "train" / "a")  # and the same when it is trained again
    again = ["train", str(last), f"--data={data}", *QUICK, "--set=lr=1e-9", "-o", str(tmp_path / "again")]
    assert linvit(*again).code == 0
    assert measure(linvit, tmp_path / "again" / "last", data)["top1"] == pytest.approx(found["top1"])
    assert json.loads((tmp_path / "again" / "last" / "config.json").read_text())["classes"] == ["a", "b", "c"]

    (data / "val" / "b").rename(data / "val" / "cow")
    refused = linvit("eval", str(last), f"--data={data}", "--device=cpu")
    assert refused.code == 2 and "photos has class 'cow', which the model does not know" in refused.err


def test_a_model_without_names(linvit: Linvit, tmp_path: Path) -> None:
    """One that an earlier linvit saved: places count, where there are as many."""
    data = photos(tmp_path / "photos", "train", "val")
    train(linvit, data, tmp_path / "run")
    last = tmp_path / "run" / "last"
    named = measure(linvit, last, data)
    config = json.loads((last / "config.json").read_text())
    del config["classes"]
    (last / "config.json").write_text(json.dumps(config))
    assert measure(linvit, last, data) == named
    shutil.rmtree(data / "val" / "a")
    refused = linvit("eval", str(last), f"--data={data}", "--device=cpu")
    assert refused.code == 2 and "has 2 classes, the model 3 outputs, and it is not known which" in refused.err


def test_imagenet_s_classes_are_synsets(linvit: Linvit, tmp_path: Path) -> None:
    data = photos(tmp_path / "photos", "train", "val", each=2)
    for name, synset in zip("abc", ("n01440764", "n02102040", "n03888257"), strict=True):
        (data / "val" / name).rename(data / "val" / synset)
    args = ["eval", *MODEL, f"--data={data}", "--device=cpu", "-o", str(tmp_path / "each.json")]
    assert linvit(*args).code == 0
    found = json.loads((tmp_path / "each.json").read_text())
    assert found["labels"] == [0, 0, 217, 217, 701, 701] and "n02102040" in found["per_class"]
