"""Train and evaluate as a user does, on digits and on folders with something wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from linvit import load, save
from linvit.training.logs import read_log
from tests.cli.conftest import Outcome
from tests.cli.training import DEIT, MODEL, QUICK, SHAPE, Linvit, folder_of


def test_train_leaves_a_run(teacher: Path) -> None:
    assert {path.name for path in teacher.iterdir()} == {"run.json", "log.jsonl", "checkpoints", "last", "best"}
    record = json.loads((teacher / "run.json").read_text())
    assert record["config"]["recipe"] == "deit" and record["config"]["batch_size"] == 128
    assert "commit" in record["environment"] and record["sets"][0] == {"name": "digits", "images": 1437}
    assert {r["kind"] for r in read_log(teacher)} == {"train", "eval"}


def test_fast_converts_aligns_and_learns(linvit: Linvit, teacher: Path, tmp_path: Path) -> None:
    args = ["--plan=castling", "--option=threshold=0.1", "--recipe=fast", *QUICK, "-o", str(tmp_path / "run")]
    outcome = linvit("train", str(teacher / "best"), "--data=digits", *args)
    assert outcome.code == 0 and "images/s" in outcome.out, outcome.err
    stages = [r["stage"] for r in read_log(tmp_path / "run") if r["kind"] == "train"]
    assert list(dict.fromkeys(stages)) == ["align", "features", "finetune"]
    assert "holds a run: --resume goes on" in linvit("train", str(teacher / "best"), "--data=digits", *args).err
    again = linvit("train", str(teacher / "best"), "--data=digits", *args, "--resume", "--json")
    assert again.code == 0 and again.json["steps"] == 12
    refused = linvit("train", str(teacher / "best"), "--data=digits", *args, "--resume", "--model-arg=depth=2")
    assert refused.code == 2 and "is a saved model, which is built as it was: leave out --model-arg" in refused.err
    other = linvit("train", str(teacher / "best"), "--data=digits", *args, "--resume", "--set=lr=1")
    assert other.code == 2 and "was begun with lr=0.0005: resume it so" in other.err
    assert linvit("show", "masks", str(tmp_path / "run"), "--json").code == 0


def test_a_converted_folder_finds_its_original(linvit: Linvit, teacher: Path, tmp_path: Path) -> None:
    """As `linvit convert` recorded it; without a record one line says what to give."""
    made, args = str(tmp_path / "made"), ["--data=digits", "--recipe=fast", *QUICK]
    assert linvit("convert", str(teacher / "best"), "--plan=stella", "-o", made).code == 0
    outcome = linvit("train", made, *args, "-o", str(tmp_path / "run"))
    assert outcome.code == 0 and f"the teacher is the original that {made} was made from" in outcome.err
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    del config["conversions"][0]["source"]
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    refused = linvit("train", made, *args, "-o", str(tmp_path / "other"))
    assert refused.code == 2 and "was made from a model that is not known: give --teacher" in refused.err
    wide = linvit("train", made, *args, "--size=8x12", "-o", str(tmp_path / "other"))
    assert wide.code == 2 and "images are square here" in wide.err


def test_a_recipe_knows_the_model_in_a_folder(linvit: Linvit, tmp_path: Path) -> None:
    """Not the folder's own name: MixA mixes no images for DeiT-T, and does for others."""
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10, **SHAPE)
    save(model, tmp_path / "swin_small", model_name="deit_tiny_patch16_224", model_args={"num_classes": 10, **SHAPE})
    args = ["--data=digits", "--plan=stella", "--recipe=mixa", "--set=randaugment=none", *QUICK]
    outcome = linvit("train", str(tmp_path / "swin_small"), *args, "-o", str(tmp_path / "run"), "--json")
    assert outcome.code == 0, outcome.err
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["recipe"], config["mixup"], config["label_smoothing"]) == ("mixa", 0, 0)


def test_eval(linvit: Linvit, teacher: Path, tmp_path: Path) -> None:
    args = ["eval", str(teacher / "best"), "--data=digits", "--device=cpu", "--teacher", str(teacher / "best")]
    found = linvit(*args, "--json", "-o", str(tmp_path / "each.json")).json
    assert found["images"] == 360 and found["agreement"] == 100 and abs(found["kl"]) < 1e-6
    assert len(found["per_class"]) == 10 and found["top5"] >= found["top1"]
    assert len(json.loads((tmp_path / "each.json").read_text())["chosen"]) == 360
    assert "worst class" in linvit(*args).out and "9 " in linvit(*args, "--per-class").out


def test_resumed_otherwise(linvit: Linvit, teacher: Path, tmp_path: Path) -> None:
    """What a run was begun with is told in words; runs of earlier versions, which did not note the loader, go on."""
    run = tmp_path / "run"
    shutil.copytree(teacher, run)
    args = ["train", *MODEL, "--data=digits", *DEIT, "-o", str(run), "--resume"]
    for given, message in (
        (["--loader=streamed"], "was begun with loader resident: resume it so"),
        (["--plan=stella"], "was begun with no plan: resume it so"),
    ):
        refused = linvit(*args, *given)
        assert refused.code == 2 and message in refused.err, refused.err
    record = json.loads((run / "run.json").read_text())
    assert record.pop("loaders") == ["resident", "resident"]
    (run / "run.json").write_text(json.dumps(record))
    assert linvit(*args).code == 0


def test_without_labels(linvit: Linvit, tmp_path: Path) -> None:
    """Images in no class folder are learnt from the teacher alone: the same weights, to the bit, as with labels of no
    weight, and what is measured is the agreement with the teacher."""
    photos = folder_of(tmp_path / "photos", train={"a": 12}, val={"a": 6})
    loose = tmp_path / "loose"
    for split in ("train", "val"):
        shutil.copytree(photos / split / "a", loose / split)
    # fmt: off
    how = ["--plan=stella", "--device=cpu", "--set=precision=fp32", "--set=epochs=3", "--set=batch_size=4",
           "--set=mixup=0.5", "--model-arg=num_classes=10"]
    # fmt: on
    taught = ["--set=distillation_weight=1"]
    assert linvit("train", *MODEL, f"--data={photos}", *how, *taught, "-o", str(tmp_path / "labels")).code == 0
    outcome = linvit("train", *MODEL, f"--data={loose}", *how, "-o", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    assert "has no labels: the teacher's answers are all there is to learn" in outcome.err
    assert "agreement" in outcome.out and "top-1" not in outcome.out
    weights = [load_file(tmp_path / run / "last" / "model.safetensors") for run in ("labels", "run")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert all("top1" not in record and 0 <= record["agreement"] <= 100 for record in evaluations)
    trained = [record for record in records if record.get("stage") == "finetune"]
    assert trained and all("agreement" in record and "accuracy" not in record for record in trained)

    shutil.rmtree(photos / "val")
    shutil.copytree(loose / "val", photos / "val")
    refused = linvit("train", *MODEL, f"--data={photos}", *how, "-o", str(tmp_path / "half"))
    assert refused.code == 2 and "has no labels to validate by" in refused.err

    best = str(tmp_path / "run" / "best")
    shown = linvit("eval", best, f"--data={loose}", f"--teacher={best}", "-o", str(tmp_path / "each.json"))
    assert "agrees with the teacher on 100.00 % of 6 images" in shown.out
    assert json.loads((tmp_path / "each.json").read_text()).keys() == {"agreement", "kl", "images", "teacher", "chosen"}
    found = json.loads(linvit("eval", best, f"--data={loose}", f"--teacher={best}", "--json").out)
    assert found["agreement"] == 100 and "top1" not in found and "per_class" not in found

    for args, message in (
        (["eval", best], "loose has no labels: put images in CLASS folders, or give --teacher"),
        (["train", *MODEL, "--recipe=deit", "-o", "x"], "has no labels to learn from: choose a recipe with a teacher"),
        (["train", *MODEL, *how, "--set=stages.finetune.epochs=1", "--set=distillation=none", "-o", "x"],
         "has no labels to learn from: choose a recipe with a teacher"),
        (["train", *MODEL, *how, "--set=distillation_weight=0.5", "-o", "x"], "set distillation_weight=1"),
    ):  # fmt: skip
        refused = linvit(*args, f"--data={loose}", "--device=cpu")
        assert refused.code == 2 and message in refused.err


def test_original_that_knows_other_classes(linvit: Linvit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretrained model with a new classifier has no answers to learn from. It is trained first, as the error says."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **args: create(name, **args))
    monkeypatch.chdir(tmp_path)
    folder_of(Path("photos"), train={"a": 8, "b": 8, "c": 8}, val={"a": 2, "b": 2, "c": 2})
    name, fresh, *shape = MODEL
    quick = ["--device=cpu", "--set=precision=fp32", "--set=epochs=1", "--set=batch_size=4"]
    args = ["train", name, "--data", "photos", "--plan=stella", "--recipe=fast", *quick, *shape, "-o", "run"]
    refused = linvit(*args)
    assert refused.code == 2 and "has not learnt these 3 classes" in refused.err and not Path("run").exists()
    first, then = (text.partition(")")[0].split() for text in refused.err.split("(linvit ")[1:])
    assert linvit(*first, *shape, *quick).code == 0
    assert linvit(*then[:-1], *quick, "-o", "run").code == 0
    linvit("convert", name, "--plan=softmax", "--no-pretrained", *shape, "--model-arg=num_classes=3", "-o", "teacher")
    for number, given in enumerate((["--teacher=teacher"], [fresh], ["--recipe=deit", "--set=randaugment=none"])):
        outcome = linvit(*args[:-1], f"fine{number}", *given)
        assert outcome.code == 0, outcome.err
    shutil.copytree("photos/train/a", "loose")
    outcome = linvit(*["loose" if word == "photos" else word for word in args[:-1]], "unlabelled")
    assert outcome.code == 0, outcome.err  # with the original's own 1000 answers


def test_alignment_alone_needs_no_labels(linvit: Linvit, tmp_path: Path) -> None:
    """A folder of images and nothing else."""
    photos = folder_of(tmp_path / "made", train={"photos": 24}) / "train" / "photos"
    how = ["--plan=stella", "--device=cpu", "--set=precision=fp32", "--set=stages.finetune.epochs=0"]
    outcome = linvit("train", *MODEL, f"--data={photos}", *how, "--set=batch_size=4", "-o", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    assert "2 of its 24 images are held out for validation" in outcome.err
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


def test_a_head_for_the_teacher(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    """Token distillation from the command line to a saved model: each head has its own task, and both are used."""
    shape = ["--model-arg=img_size=8", "--model-arg=patch_size=4", "--model-arg=embed_dim=16", "--model-arg=depth=1"]
    common = ["--no-pretrained", *shape, "--model-arg=num_heads=2", "--data=digits", "--set=epochs=0.2", "--device=cpu",
              "--set=batch_size=64", "--set=precision=fp32", "--set=randaugment=none"]  # fmt: skip
    assert linvit("train", "vit_tiny_patch16_224", *common, "--recipe=deit", "-o", str(tmp_path / "teacher")).code == 0
    student = ["train", "deit_tiny_distilled_patch16_224", *common, "--plan=castling", "--recipe=castling"]
    found = linvit(*student, f"--teacher={tmp_path / 'teacher' / 'best'}", "-o", str(tmp_path / "run"))
    assert found.code == 0, found.err
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert config["distillation"] == "token"
    model = load(tmp_path / "run" / "last")
    assert not torch.equal(model.head.bias, model.head_dist.bias) and model.head_dist.bias.abs().max() > 0
