"""`linvit.tasks.train` and `evaluate`, and where a converted folder finds its original."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

import linvit
from linvit.conversion.opening import open_model, open_original
from linvit.conversion.plan import as_plan
from linvit.errors import LinvitError
from linvit.tasks import evaluate, train
from linvit.tasks.classify.data import open_data
from linvit.training.config import override
from linvit.training.recipes import recipe
from tests.training.toys import SMALL, same, weights

ARGS = {**SMALL, "num_classes": 10}
QUICK = ["precision=fp32", "batch_size=128", "epochs=1"]
HERE: dict[str, Any] = {"device": "cpu", "workers": 0}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits, trained from its timm name."""
    folder = tmp_path_factory.mktemp("original")
    options: dict[str, Any] = {"pretrained": False, "model_args": SMALL | {"num_classes": 10}, "output": folder}
    found = train("vit_tiny_patch16_224", "digits", "finetune", settings=[*QUICK, "lr=1e-2"], **options, **HERE)
    assert found.steps == 11 and found.best["top1"] >= found.last["top1"] and found.model is not None
    return folder / "last"


def test_a_model_and_opened_sets(original: Path) -> None:
    model, sets = linvit.load(original), open_data("digits")
    before, notes = weights(model), []
    config = override(recipe("fast"), QUICK)
    found = train(model, sets, config, plan=as_plan("stella"), watch=notes.append, **HERE)
    assert found.model is model and not same(before, weights(model)) and found.report is not None
    assert "2 of 2" in str(found.report).splitlines()[0] or found.report.layers
    measured = evaluate(model, sets[1], teacher=linvit.load(original), **HERE)
    assert measured.top1 == found.last["top1"] and measured.agreement is not None
    assert {record["kind"] for record in notes} >= {"train", "eval"}


def test_settings_as_a_dictionary_and_a_loader_of_ones_own(original: Path) -> None:
    settings = {"precision": "fp32", "batch_size": 512, "epochs": 1, "clip_norm": None, "betas": (0.9, 0.99)}
    found = train(original, "digits", "finetune", settings=settings, **HERE)
    assert found.steps == 2
    loader = DataLoader(TensorDataset(torch.zeros(2, 3, 8, 8), torch.zeros(2)))
    for call in (train, evaluate):
        with pytest.raises(LinvitError, match="not a DataLoader: batches of your own are for your own loop"):
            call(original, loader, **HERE)
    with pytest.raises(LinvitError, match=r"convert takes a model, not OrderedDict$"):
        linvit.convert(linvit.load(original).state_dict(), "stella")  # type: ignore[arg-type]


def test_a_converted_folder_learns_from_its_original(original: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(original, tmp_path / "original")
    model = linvit.load(moved)
    linvit.convert(model, "stella")
    linvit.save(model, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["conversions"][0]["source"] == {
        "folder": str(moved.resolve())
    }
    heard: list[dict[str, Any]] = []
    options: dict[str, Any] = {"settings": QUICK, "watch": heard.append, **HERE}
    train(tmp_path / "converted", "digits", "fast", output=tmp_path / "run", **options)
    assert f"the teacher is the original that {tmp_path / 'converted'} was made from" in heard[0]["text"]
    again = linvit.load(tmp_path / "run" / "best")
    assert same(weights(open_original(again, "again")), weights(linvit.load(moved))), "trained, it has the same one"
    shutil.rmtree(moved)
    with pytest.raises(LinvitError, match=r"converted was made from .*original, which is gone: give --teacher"):
        train(tmp_path / "converted", "digits", "fast", **options)


def test_other_sources_of_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timm model is built again, a checkpoint is read again; what had random weights has nothing to teach."""
    made: list[bool] = []
    create = timm.create_model

    def watched(name: str, pretrained: bool = False, **args: Any) -> torch.nn.Module:
        made.append(pretrained)
        torch.manual_seed(5 if pretrained else len(made))
        return create(name, **args)

    monkeypatch.setattr("timm.create_model", watched)
    for pretrained in (True, False):
        model = open_model("vit_tiny_patch16_224", pretrained=pretrained, args=ARGS)
        before = weights(model)
        linvit.convert(model, "stella", size=(8, 8))
        if pretrained:
            assert same(weights(open_original(model, "it")), before) and made == [True, True]
        else:
            with pytest.raises(LinvitError, match="it was made from random weights: give --teacher"):
                open_original(model, "it")
    torch.save(before, tmp_path / "weights.pt")
    model = open_model("vit_tiny_patch16_224", args=ARGS, checkpoint=tmp_path / "weights.pt")
    linvit.convert(model, "stella", size=(8, 8))
    assert same(weights(open_original(model, "it")), before)
    unknown = create("vit_tiny_patch16_224", **ARGS)
    linvit.convert(unknown, "stella", size=(8, 8))
    with pytest.raises(LinvitError, match="it was made from a model that is not known: give --teacher"):
        open_original(unknown, "it")


def test_size_and_notes(original: Path, tmp_path: Path) -> None:
    model = open_model("vit_tiny_patch16_224", pretrained=False, args={**ARGS, "dynamic_img_size": True})
    settings = [*QUICK, "epochs=0.2"]
    train(model, "digits", "finetune", size=12, settings=settings, output=tmp_path, resume=True, watch=print, **HERE)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["config"]["input_size"] == 12 and saved["model"] == "VisionTransformer"
    assert evaluate(tmp_path / "last", "digits", size=16, **HERE).top1 >= 0
    with pytest.raises(LinvitError, match=r"cannot take images of 12 pixels .*set size=none"):
        evaluate(original, "digits", size=12, **HERE)
    with pytest.warns(UserWarning, match="there is nothing to resume"), warnings.catch_warnings():
        warnings.simplefilter("default")
        train(model, "digits", "finetune", settings=settings, output=tmp_path / "other", resume=True, **HERE)


def test_a_resumed_run_converts_the_layers_that_auto_chose_first(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured anew, other layers might pay, and the checkpoint would not fit."""
    chosen = iter([as_plan("stella", keep=[1]), as_plan("stella", keep=[0])])
    sizes: list[Any] = []

    def resolve(model: Any, plan: Any, named: Any, size: Any, device: Any) -> Any:
        sizes.append(size)
        return next(chosen), None

    monkeypatch.setattr("linvit.tasks.public.resolve", resolve)
    options: dict[str, Any] = {"plan": "auto", "settings": QUICK, "output": tmp_path / "run", "size": 8, **HERE}
    first = train(linvit.load(original), "digits", "finetune", **options)
    again = train(linvit.load(original), "digits", "finetune", resume=True, **options)
    for found in (first, again):
        assert found.report is not None and [layer.after for layer in found.report.layers] == ["stella", "softmax"]
    assert same(weights(first.model), weights(again.model)) and sizes == [(8, 8)]
