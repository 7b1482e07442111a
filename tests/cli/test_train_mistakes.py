"""What goes wrong in a training, and what a user is told."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from linvit import load, save
from linvit.files import locked
from linvit.tasks import fitting
from linvit.training.engine.step import Stepper
from tests.cli.conftest import Outcome
from tests.cli.training import DEIT, MODEL, SMALL, Linvit, broken, folder_of


@pytest.mark.parametrize(
    "data, args, message",
    [
        (lambda p: p / "nowhere", [], "nowhere"),
        (lambda p: folder_of(p, train={}, val={}), [], "has no class folders"),
        (lambda p: folder_of(p, train={"a": 4, "b": 4}, val={"a": 2}), [], "b"),
        (broken, [], "cannot read image"),
        (lambda p: folder_of(p, train={"a": 4, "b": 4}, val={"a": 1, "b": 1}), ["--set=batch_size=64"],
         "8 images, less than one batch of 64: give a smaller --set batch_size=…"),
        (lambda p: folder_of(p, train={"a": 4, "b": 4, "c": 4}, val={"a": 1, "b": 1, "c": 1}),
         ["--model-arg=num_classes=2"], "has 3 classes, the model 2 outputs"),
    ],
    ids=["missing", "empty", "class without validation", "unreadable", "too few", "too many classes"],
)  # fmt: skip
def test_bad_data(linvit: Linvit, tmp_path: Path, data: Callable[[Path], Path], args: list[str], message: str) -> None:
    given = data(tmp_path / "photos")
    outcome = linvit("train", *MODEL, f"--data={given}", *SMALL, *args, "-o", str(tmp_path / "run"))
    assert outcome.code == 2 and message in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ") and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--recipe=mixo"], "unknown recipe 'mixo'; did you mean mixa"),
        (["--plan=mixo"], "unknown plan 'mixo'; did you mean mixa"),
        (["--recipe=fast"], "give --plan to learn from the original, --teacher, or a recipe that needs none"),
        (["--set=lr=fast"], "lr=fast: a number expected"),
        (["--loader=disk"], "unknown loader 'disk'"),
        (["--set=random_sizes=8,12"], "cannot take images of 12 pixels"),
        (["--set=precision=fp16"], "precision=fp16 needs a GPU"),
        (["--set=batch_size=127", "--set=mixup=1"], "127 images a process is odd"),
        (["--recipe=fast", "--plan=stella", "--teacher=TEACHER"], "must have the same attention layers"),
        (["--set=distillation=soft", "--teacher=TEACHER", "--model-arg=num_classes=12"], "the teacher has 10 classes"),
        (["--set=distillation=token", "--teacher=TEACHER"], "token distillation needs a distilled model"),
        (["--set=distillation=soft", "--teacher=nobody"], "unknown teacher 'nobody'"),
        (["--set=distillation=soft", "--teacher=runs/nope"], "there is no folder runs/nope, and the Hugging Face hub"),
        (["--set=distillation=soft", "--teacher=TEACHER", "--model-arg=img_size=16"],
         "the teacher is for images of 8 pixels and the student's have 16"),
        (["--set=distillation=soft", "--teacher=TEACHER", "--set=random_sizes=8,12",
          "--model-arg=dynamic_img_size=true"], "the teacher is for images of 8 pixels and the student's have 12"),
        (["--workers=-1"], "--workers -1: give 0 or more"),
        (["--recipe=fast", "--plan=stella", "--set=stages.finetune.trainable=nothing"],
         "stage finetune: no parameter of the model is 'nothing'"),
        (["--recipe=fast", "--teacher=TEACHER"], "trains converted layers, and the model has none: give --plan"),
        (["--set=stages.align.epochs=2"], "recipe deit has no stages"),
        (["--option=local=3"], "--option, --keep and --drop are of a conversion: give --plan too"),
        (["--keep=1"], "--option, --keep and --drop are of a conversion: give --plan too"),
        (["--plan=stella", "--keep=4"], "cannot keep 4 layers: the model has 2"),
        (["--set=optimiser=muon", "--set=muon=attention"], "muon=attention: no matrix of the model is called so"),
        (["--set=eps=0"], "eps=0"),
        (["--data=torch/cifar10"], "torch/cifar10 may lie anywhere: give its folder by --root DIR"),
    ],
)  # fmt: skip
def test_mistakes(linvit: Linvit, teacher: Path, tmp_path: Path, args: list[str], message: str) -> None:
    args = [text.replace("TEACHER", str(teacher / "best")) for text in args]
    deeper = ["--model-arg=depth=3"] if "--recipe=fast" in args else []
    outcome = linvit("train", *MODEL, *deeper, "--data=digits", *DEIT, *args, "-o", str(tmp_path / "run"))
    *notes, error = outcome.err.splitlines()
    assert outcome.code == 2 and error.startswith("error: ") and message in error
    assert not notes or "has random weights: train it first" in notes[0]
    assert len(notes) < 2 and len(error) < 400 and not (tmp_path / "run").exists()


def test_image_that_breaks_off_during_a_run(linvit: Linvit, tmp_path: Path) -> None:
    """The set must stay the same for the run to go on: a file is put in its place."""
    photos, run = broken(tmp_path / "photos"), str(tmp_path / "run")
    args = ["train", *MODEL, f"--data={photos}", *SMALL, "--loader=streamed", "--workers=0", "-o", run]
    outcome = linvit(*args)
    assert outcome.code == 2 and "a/1.png: " in outcome.err and "replace the file rather than delete it" in outcome.err
    (photos / "train" / "a" / "1.png").unlink()
    assert "was begun with 8 images of" in linvit(*args, "--resume").err
    shutil.copy(photos / "train" / "a" / "0.png", photos / "train" / "a" / "1.png")
    assert linvit(*args, "--resume").code == 0


def test_a_resumed_run_keeps_its_classes(linvit: Linvit, tmp_path: Path) -> None:
    """A class folder that was renamed would move all labels behind it."""
    photos = folder_of(tmp_path / "photos", train={"a": 4, "b": 4}, val={"a": 2, "b": 2})
    args = ["train", *MODEL, f"--data={photos}", *SMALL, "-o", str(tmp_path / "run"), "--resume"]
    first = linvit(*args)
    assert first.code == 0 and f"there is nothing to resume in {tmp_path / 'run'}: begun anew" in first.err
    for split in ("train", "val"):
        (photos / split / "a").rename(photos / split / "c")
    refused = linvit(*args)
    assert refused.code == 2 and "was begun with classes a, b in this order: resume it so" in refused.err


def test_a_resumed_run_keeps_its_images_and_labels(linvit: Linvit, tmp_path: Path) -> None:
    photos = folder_of(tmp_path / "photos", train={"a": 4, "b": 4}, val={"a": 2, "b": 2})
    args = ["train", *MODEL, f"--data={photos}", *SMALL, "-o", str(tmp_path / "run"), "--resume"]
    assert linvit(*args).code == 0 and linvit(*args).code == 0
    a, b = photos / "train" / "a", photos / "train" / "b"
    whole = (a / "0.png").read_bytes()

    changes = {
        "labels": (lambda: (a / "0.png").rename(b / "9.png"), lambda: (b / "0.png").rename(a / "9.png")),
        "image": (lambda: (a / "0.png").write_bytes(whole + b"more"),),
    }
    for what, change in changes.items():
        shutil.copytree(photos, tmp_path / what)
        for step in change:
            step()
        refused = linvit(*args)
        assert refused.code == 2 and "was begun with other images or labels of the same number" in refused.err
        shutil.rmtree(photos)
        shutil.copytree(tmp_path / what, photos)
        assert linvit(*args).code == 0, "put back, it goes on"


def test_two_runs_in_one_folder(linvit: Linvit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "PATIENCE", 0.3)
    args = ["train", *MODEL, "--data=digits", *DEIT, "-o", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        refused = linvit(*args)
    assert refused.code == 2 and f"another process trains into {tmp_path / 'run'}: wait for it" in refused.err
    assert not list((tmp_path / "run").iterdir())
    assert linvit(*args).code == 0


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_model_that_is_not_there_is_told_before_its_data(linvit: Linvit, tmp_path: Path, verb: str) -> None:
    (tmp_path / "Annotations").mkdir()  # as of VOC, which no class folder is
    refused = linvit(verb, "runs/typo/best", f"--data={tmp_path}", *(["-o", str(tmp_path / "run")] * (verb == "train")))
    assert refused.code == 2 and "model 'runs/typo/best': there is no such folder" in refused.err, refused.err


@pytest.mark.parametrize("name", ["last", "checkpoints"])
def test_a_file_in_the_way_is_found_first(linvit: Linvit, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    refused = linvit("train", *MODEL, "--data=digits", *DEIT, "-o", str(tmp_path))
    assert refused.code == 2 and f"{tmp_path / name} is a file where a folder must be" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_divergence_is_told_once(linvit: Linvit, tmp_path: Path) -> None:
    found = linvit(
        "train", *MODEL, "--data=digits", *DEIT, "--set=lr=1e30", "--set=clip_norm=none", "-o", str(tmp_path)
    )
    assert found.code == 2 and found.err.count("the loss is NaN or infinite") == 1, found.err


def test_stopped_by_hand(linvit: Linvit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, "take", stopped)
    found = linvit("train", *MODEL, "--data=digits", *DEIT, "-o", str(tmp_path / "run"))
    assert found.code == 130 and "stopped before the first checkpoint: the same command begins" in found.err
    assert "--resume" not in found.err


def test_terminated(linvit: Linvit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is finished, a checkpoint written, and the last line says where the run goes on, which is so."""
    take = Stepper.take

    def terminated(self: Stepper, step: int, *args: Any) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
        take(self, step, *args)

    args = ["train", *MODEL, "--data=digits", *DEIT, "-o", str(tmp_path / "run")]
    monkeypatch.setattr(Stepper, "take", terminated)
    found = linvit(*args)
    assert found.code == 128 + signal.SIGTERM, found.err
    assert found.err.splitlines()[-1].startswith("stopped: the same command with --resume goes on after step 5 (")
    monkeypatch.setattr(Stepper, "take", take)
    assert "resumed after step 5 of 11" in linvit(*args, "--resume").err


def test_hub_out_of_reach(linvit: Linvit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no hub")

    monkeypatch.setattr(timm, "create_model", unreachable)
    refused = linvit("train", MODEL[0], "--data=digits", *DEIT, "-o", str(tmp_path / "run"))
    assert refused.code == 2 and refused.err.endswith("); give --no-pretrained\n")


def test_eval_mistakes(linvit: Linvit, teacher: Path, tmp_path: Path) -> None:
    best = str(teacher / "best")
    assert "10 classes" in linvit("eval", *MODEL, "--data=digits", "--model-arg=num_classes=3", "--device=cpu").err
    assert "no data at" in linvit("eval", best, f"--data={tmp_path / 'x'}", "--device=cpu").err
    assert "make it first" in linvit("eval", best, "--data=digits", "-o", str(tmp_path / "x" / "y.json")).err
    assert f"{tmp_path} is a folder: give a file" in linvit("eval", best, "--data=digits", "-o", str(tmp_path)).err
    model = load(best)
    torch.nn.init.constant_(model.head.bias, torch.nan)
    save(model, tmp_path / "nan")
    for args in ([], ["--json"]):
        broken = linvit("eval", str(tmp_path / "nan"), "--data=digits", "--device=cpu", *args)
        assert (
            broken.code == 2 and "gives NaN or infinite outputs for 360 of 360 images" in broken.err and not broken.out
        )


def test_a_teacher_nobody_asks_is_a_mistake(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    found = linvit("train", "vit_tiny_patch16_224", "--no-pretrained", "--data=digits", "--recipe=deit",
                   "--teacher=no_such_model", "-o", str(tmp_path / "run"))  # fmt: skip
    assert found.code == 2 and "recipe deit has no use for a teacher" in found.err and not (tmp_path / "run").exists()
