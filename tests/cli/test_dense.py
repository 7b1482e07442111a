"""Detectors and segmenters from the command line: trained, evaluated, asked and timed on six photographs."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from linvit.cli import main
from linvit.tasks.dense.loading import DenseSource
from linvit.training.logs import read_log
from tests.cli.training import Linvit
from tests.dense_fixture import CATEGORIES, write_ade, write_voc
from tests.tasks.features.pictures import write_tiles

TRUNK = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SMALL = {
    "semantic_fpn": {"channels": 16, "head_channels": 16},
    "faster_rcnn": {"width": 16, "hidden": 32, "proposals": 20, "samples": 16, "anchor_sizes": [8, 16, 24, 32, 48]},
}
VIT = ["vit_tiny_patch16_224", "--no-pretrained", *(f"--model-arg={key}={value}" for key, value in TRUNK.items())]
QUICK = ["--recipe=finetune", "--device=cpu", "--workers=0", "--set=precision=fp32", "--set=batch_size=2"]
SHORT = [*QUICK, "--size=64", "--set=epochs=1", "--set=eval_epochs=1"]


def head(name: str) -> list[str]:
    """A small model with this head, as arguments."""
    args = {"backbone": VIT[0], "backbone_args": json.dumps(TRUNK), **SMALL[name]}
    return [name, "--no-pretrained", *(f"--model-arg={key}={value}" for key, value in args.items())]


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_voc(tmp_path_factory.mktemp("voc"), 64)


@pytest.fixture(scope="module")
def segmenter(voc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(head("semantic_fpn"), voc, tmp_path_factory.mktemp("segmenter"))


@pytest.fixture(scope="module")
def detector(voc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(head("faster_rcnn"), voc, tmp_path_factory.mktemp("detector"))


def trained(model: list[str], data: Path, folder: Path) -> Path:
    with pytest.raises(SystemExit) as stop:
        main(["train", *model, f"--data={data}", *SHORT, "-o", str(folder)])
    assert not stop.value.code
    return folder / "last"


def test_a_segmenter(linvit: Linvit, voc: Path, segmenter: Path, tmp_path: Path) -> None:
    """Its metrics in the log, and the same ones from eval, each class and as JSON."""
    last = [record for record in read_log(segmenter.parent) if record["kind"] == "eval"][-1]
    args = ["eval", str(segmenter), f"--data={voc}", "--device=cpu", "--workers=0"]
    found = linvit(*args, "--json").json
    assert {name: found[name] for name in ("mIoU", "mAcc", "pAcc")} == {
        name: last[name] for name in ("mIoU", "mAcc", "pAcc")
    }
    assert set(found["per_class"]) <= {"background", *CATEGORIES}
    shown = linvit(*args, "--per-class", "--task=segment").out
    assert f"mIoU {100 * found['mIoU']:.2f} %" in shown and "IoU" in shown and "rocket" in shown
    refused = linvit(*args, "-o", str(tmp_path / "each.json"))
    assert refused.code == 2 and "take --json" in refused.err


def test_a_detector(linvit: Linvit, voc: Path, detector: Path) -> None:
    args = ["eval", str(detector), f"--data={voc}", "--device=cpu", "--workers=0", "--batch=3"]
    found = linvit(*args, "--json").json
    last = [record for record in read_log(detector.parent) if record["kind"] == "eval"][-1]
    assert found["mAP"] == last["mAP"] and -1 <= found["APl"] <= 1 and set(found["per_class"]) == set(CATEGORIES)
    shown = linvit(*args).out
    assert all(name in shown for name in ("boxes", "mAP", "AP50", "ARl", "worst class")) and "masks" not in shown


def test_a_classifier_becomes_the_trunk(linvit: Linvit, voc: Path, tmp_path: Path) -> None:
    deep = [word.replace("depth=2", "depth=4").replace("dim=16", "dim=24") for word in VIT]
    outcome = linvit("train", *deep, "--head=semantic_fpn", "--pyramid=adapter", f"--data={voc}", *SHORT, "-o",
                     str(tmp_path / "run"))  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "mIoU" in outcome.out and "pAcc" in outcome.out and "top-1" not in outcome.out
    assert "step 3: mIoU" in outcome.err
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config["model"] == "semantic_fpn" and config["args"]["pyramid"] == "adapter"
    assert config["classes"] == ["background", *CATEGORIES]


@pytest.mark.parametrize("name", SMALL)
def test_stopped_and_resumed(
    linvit: Linvit, voc: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of an epoch, and --resume: the same bits as without."""
    args = ["train", *head(name), f"--data={voc}", *SHORT, "--set=checkpoint_seconds=0", "--set=epochs=2"]
    assert linvit(*args, "-o", str(tmp_path / "whole")).code == 0
    taken, epoch = 0, DenseSource.epoch

    def interrupted(self: DenseSource, *place: Any, **how: Any) -> Any:
        nonlocal taken
        for batch in epoch(self, *place, **how):
            taken += self.reader.padded  # only in training
            if taken == 5:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(DenseSource, "epoch", interrupted)
    stopped = linvit(*args, "-o", str(tmp_path / "run"))
    assert stopped.code == 130 and "the same command with --resume goes on" in stopped.err
    monkeypatch.setattr(DenseSource, "epoch", epoch)
    assert linvit(*args, "-o", str(tmp_path / "run"), "--resume").code == 0
    weights = [load_file(tmp_path / run / "last" / "model.safetensors") for run in ("whole", "run")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_trained_segmenter_is_converted_and_trained_back(
    linvit: Linvit, voc: Path, segmenter: Path, tmp_path: Path
) -> None:
    fast = [word for word in SHORT if not word.startswith("--recipe")]
    args = ["train", str(segmenter), "--plan=stella", f"--data={voc}", *fast, "--recipe=fast", "--set=epochs=2"]
    outcome = linvit(*args, "-o", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    stages = [record["stage"] for record in read_log(tmp_path / "run") if record["kind"] == "train"]
    assert list(dict.fromkeys(stages)) == ["align", "maps", "finetune"]


def test_predict(linvit: Linvit, voc: Path, segmenter: Path, detector: Path, tmp_path: Path) -> None:
    """A folder, a name that is not ASCII, a missing and a truncated file; inputs stay as they are."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, file in enumerate(sorted((voc / "JPEGImages").glob("val_*"))[:2]):
        shutil.copy(file, photos / f"катя {number}.jpg")
    Image.open(file).save(photos / "a.png")
    (tmp_path / "cut.jpg").write_bytes(file.read_bytes()[:700])
    before = {path.name: path.read_bytes() for path in photos.iterdir()}
    given = [str(photos), str(tmp_path / "cut.jpg"), str(tmp_path / "none.jpg"), "--device=cpu", "-o", str(photos)]
    outcome = linvit("predict", str(segmenter), *given)
    assert outcome.code == 1 and outcome.out.count(" → ") == 3
    errors = outcome.err.splitlines()
    assert len(errors) == 2 and "cut.jpg" in errors[0] and "there is no image" in errors[1] and "none.jpg" in errors[1]
    assert {name: (photos / name).read_bytes() for name in before} == before, "an image was overwritten"
    assert (photos / "a-2.png").exists() and (photos / "катя 1.png").exists()
    args = ["predict", str(detector), str(photos / "a.png"), "--device=cpu", "-o", str(tmp_path / "new" / "out")]
    found = linvit(*args, "--threshold=0", "--json").json
    (image,) = found["images"]
    assert image["picture"] == str(tmp_path / "new" / "out" / "a.png") and Path(image["picture"]).exists()
    assert len(image["objects"]) and set(image["objects"][0]) == {"class", "score", "box"}
    assert "nothing scores 1" in linvit(*args, "--threshold=1").out
    assert "left" in linvit(*args, "--threshold=0", "--size=32").out


def test_bench(linvit: Linvit, segmenter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head by name beside two plans, and a saved model with its own weights."""
    few = ["--size=32", "--batch=2", "--budget=0.005", "--device=cpu"]
    model = [word for word in head("faster_rcnn") if word != "--no-pretrained"]
    path = tmp_path / "dense.json"
    args = ["bench", "model", *model, "--plan=stella,mixa:keep=1", *few, "--runtime=eager", "-o", str(path)]
    outcome = linvit(*args)
    assert outcome.code == 0, outcome.err
    result = json.loads(path.read_text())
    assert result["kind"] == "bench dense" and result["complete"] and "commit" in result["environment"]
    rows = result["rows"]
    assert [(row["pass"], row["attention"]) for row in rows] == [
        (which, name) for which in ("inference", "training") for name in ("softmax", "stella", "mixa:keep=1")
    ]
    assert all(row["status"] == "ok" and row["images_per_second"] > 0 and row["error"] < 1e-3 for row in rows)
    for row in rows[:3]:
        assert set(row["parts_ms"]) == {"backbone", "attention", "neck", "head"}
        parts = row["macs"]
        assert parts["whole"] == parts["backbone"] + parts["neck"] + parts["head"] and parts["attention"] > 0
    assert "mixa:keep=1" in outcome.out and linvit("bench", "model", "--from", str(path), "--json").json == result
    compiled: list[str] = []

    def compile_quickly(module: torch.nn.Module, **how: Any) -> None:
        compiled.append(type(module).__name__)
        compile_module(module, backend="eager", **how)

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    args = ["bench", "model", str(segmenter), *few, "--runtime=compiled", "--passes=training", "--json"]
    rows = linvit(*args, "-o", str(tmp_path / "saved.json")).json["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 2 and compiled == ["Backbone", "FeaturePyramidNetwork"] * 2


def test_what_is_off_gets_no_speed(linvit: Linvit, segmenter: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def convert(model: Any, plan: Any, **options: Any) -> None:
        model.backbone.trunk.blocks[0].register_forward_hook(
            lambda module, args, out: out.abs() if out.dtype == torch.float32 else out
        )

    monkeypatch.setattr("linvit.conversion.convert", convert)
    args = ["bench", "model", str(segmenter), "--size=32", "--batch=1", "--budget=0.005", "--device=cpu"]
    outcome = linvit(*args, "--passes=inference", "--runtime=eager", "-o", str(tmp_path / "b.json"))
    assert outcome.code == 1 and "wrong" in outcome.out


@pytest.mark.parametrize("which", ["segmenter", "detector"])
def test_photographs_without_annotations(
    linvit: Linvit, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The backbone is aligned with the original's; the head, which nobody could teach, stays."""
    model, photos = request.getfixturevalue(which), write_tiles(tmp_path / "photos", side=64)
    for file in sorted(photos.iterdir())[8:]:
        file.unlink()
    args = ["train", str(model), f"--data={photos}", *SHORT[1:], "--recipe=fast", "-o", str(tmp_path / "run")]
    outcome = linvit(*args, "--plan=stella", "--set=stages.maps.fit=4")
    assert outcome.code == 0, outcome.err
    assert f"{photos} has no annotations: stage finetune is left out, and nothing is judged" in outcome.err
    assert {r["stage"] for r in read_log(tmp_path / "run") if r["kind"] == "train"} == {"align", "maps"}
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "last"))
    moved = {name.partition(".")[0] for name in before if name in after and not torch.equal(before[name], after[name])}
    assert moved == {"backbone"}
    refused = linvit(
        "train", str(model), f"--data={photos}", *SHORT, "--recipe=finetune", "-o", str(tmp_path / "other")
    )
    assert refused.code == 2 and "has no annotations to learn from: give a set in COCO's" in refused.err


def test_mistakes(linvit: Linvit, voc: Path, segmenter: Path, detector: Path, tmp_path: Path) -> None:
    masks = write_ade(tmp_path / "ade", 32)
    here = [f"--data={voc}", *SHORT, "-o", str(tmp_path / "run")]
    fewer = shutil.copytree(voc, tmp_path / "fewer")
    for file in (fewer / "Annotations").iterdir():
        file.write_text(file.read_text().replace("<name>cat<", "<name>lynx<"))
    (fewer / "classes.txt").write_text((fewer / "classes.txt").read_text().replace("cat", "lynx"))
    for args, says in (
        (["train", *VIT, "--head=fpn", *here], "unknown head 'fpn'; known: faster_rcnn"),
        (["train", *VIT, "--head=upernet", "--task=detect", *here], "--task detect, but upernet is made to segment"),
        (["train", *VIT, "--task=detekt", *here], "unknown task 'detekt'"),
        (["train", *VIT, "--pyramid=simple", *here], "--pyramid is of detectors and segmenters"),
        (["train", *VIT, "--head=semantic_fpn", "--pyramid=own", *here], "give pyramid='simple' or pyramid='adapter'"),
        (["train", *VIT, "--head=semantic_fpn", "--plan=stella", *here, "--recipe=fast"], "has learnt nothing yet"),
        (["train", *VIT, "--head=semantic_fpn", *here, "--recipe=fast"], "learns from a teacher: give --plan"),
        (["train", *head("semantic_fpn"), *here, "--loader=resident"], "leave --loader resident out"),
        (["train", str(segmenter), "--head=upernet", *here], "has its head, semantic_fpn: leave --head"),
        (["train", *head("semantic_fpn"), *here, "--recipe=deit"], "unknown recipe to segment 'deit'"),
        (["train", *VIT, "--task=detect", f"--data={masks}", *here[1:]], "has mask files but no boxes"),
        (["eval", str(detector), f"--data={fewer}", "--device=cpu"], "category 'lynx', which the model does not know"),
        (["eval", str(detector), f"--data={voc}", "--teacher=x", "--device=cpu"], "leave --teacher out"),
        (["eval", str(detector), f"--data={voc}", "--task=segment"], "--task segment, but faster_rcnn is made to"),
        (["predict", "semantic_fpn", "a.png"], "semantic_fpn has learnt nothing"),
        (["predict", str(segmenter), str(tmp_path / "ade" / "nothing")], "there is no image"),
        (["bench", "model", "semantic_fpn", "--device=cpu"], "semantic_fpn wants a backbone"),
        (["bench", "model", str(segmenter), "--runtime=graph", "--device=cpu", "-o", str(tmp_path / "b.json")],
         "use eager or compiled"),
    ):  # fmt: skip
        outcome = linvit(*args)
        assert (outcome.code == 2 or "predict" in args) and says in outcome.err, (args, outcome.err)
        assert outcome.err.count("\n") == 1, outcome.err
    assert not (tmp_path / "run").exists()


def test_a_missing_extra(linvit: Linvit, voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    outcome = linvit("train", *head("faster_rcnn"), f"--data={voc}", *SHORT, "-o", str(tmp_path / "run"))
    assert outcome.code == 2 and "pip install linvit[dense]" in outcome.err
