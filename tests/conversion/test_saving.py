"""Saved models come back as they were, from nothing but their folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import linvit
from linvit import LinvitError
from linvit.conversion.convert import own_size
from linvit.conversion.saving import CONFIG, WEIGHTS, label_names, load, note, save
from tests.conversion.families import FAMILIES, VIT, Family, permitting

DEIT = Family("deit_tiny_patch16_224", VIT)


def converted(family: Family = DEIT, plan: str = "stella", **options: Any) -> nn.Module:
    model = family.build()
    linvit.convert(model, permitting(plan, **options), size=family.sizes[0])
    return model


@torch.no_grad()
def same(a: nn.Module, b: nn.Module, image: torch.Tensor) -> bool:
    return torch.equal(a.eval()(image), b.eval()(image))


def test_a_compiled_model_is_converted_where_it_is(tmp_path: Path) -> None:
    model = DEIT.build().eval()
    compiled, image = torch.compile(model, backend="eager"), DEIT.image()
    with torch.no_grad():
        before = compiled(image)
    report = linvit.convert(compiled, "stella")
    assert [layer.name for layer in report.layers] == ["blocks.0.attn", "blocks.1.attn"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(image), model(image))
        assert not torch.allclose(compiled(image), before)
    linvit.save(compiled, tmp_path)
    assert same(load(tmp_path), model, image)


def test_every_family_in_a_fresh_process(tmp_path: Path) -> None:
    expected = {}
    built = [family for family in FAMILIES if family.trim is None]
    for i, family in enumerate(built):
        model = converted(family, "qt" if i % 2 else "castling")
        save(model, tmp_path / family.model, model_args=family.options)
        with torch.no_grad():
            expected[family.model] = model(family.image())
    safetensors.torch.save_file({f.model: f.image() for f in built}, tmp_path / "images")
    code = """
import sys, pathlib, linvit, torch, safetensors.torch
folder = pathlib.Path(sys.argv[1])
images = safetensors.torch.load_file(folder / "images")
with torch.no_grad():
    outputs = {name: linvit.load(folder / name)(image) for name, image in images.items()}
safetensors.torch.save_file(outputs, folder / "outputs")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    found = safetensors.torch.load_file(tmp_path / "outputs")
    for name, output in expected.items():
        assert torch.equal(found[name], output), name


def test_the_config_says_what_the_model_is(tmp_path: Path) -> None:
    model = converted(plan="mixa", keep=1)
    save(model, tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [CONFIG, WEIGHTS]
    assert (tmp_path / "m" / CONFIG).stat().st_mode == (tmp_path / "m" / WEIGHTS).stat().st_mode
    config = json.loads((tmp_path / "m" / CONFIG).read_text())
    assert config["format"] == 1 and config["linvit"] == linvit.__version__
    assert config["model"] == "deit_tiny_patch16_224" and config["args"]["depth"] == 2
    assert config["conversions"][0]["plan"]["name"] == "mixa" and config["conversions"][0]["input_size"] == [64, 64]
    assert [row["mechanism"] for row in config["layers"]] == ["relu_quadratic", "stella"]
    assert config["preprocessing"]["input_size"] == [3, 64, 64]
    assert config["preprocessing"]["mean"] == list(timm.data.IMAGENET_DEFAULT_MEAN)


def test_arguments_are_read_off_common_models(tmp_path: Path) -> None:
    for family in FAMILIES[:3]:
        model = converted(family)
        save(model, tmp_path / "m")
        assert same(model, load(tmp_path / "m"), family.image())


def test_a_model_that_cannot_be_told_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.model == "efficientvit_b1")
    with pytest.raises(LinvitError, match=r"not this model: .* is .*, not .*; give model_args=") as error:
        save(converted(family), tmp_path / "m")
    assert "\n" not in str(error.value)
    model = timm.create_model("deit_tiny_patch16_224", depth=1)
    model.blocks[0].norm1.eps = 1e-3
    with pytest.raises(LinvitError, match=r"blocks.0.norm1.eps is 0.001, not 1e-06"):
        save(model, tmp_path / "m")
    with pytest.raises(LinvitError, match=r"pos_embed is .*; give model_args={'img_size': …}"):
        save(timm.create_model("volo_d1_224", img_size=256), tmp_path / "m")
    with pytest.raises(LinvitError, match="no timm name"):
        save(nn.Linear(2, 2), tmp_path / "m")
    with pytest.raises(LinvitError, match="did you mean deit_tiny_patch16_224"):
        save(model, tmp_path / "m", model_name="deit_tiny_patch16_22")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, args",
    [
        ("qtvit_1_noape", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1), "num_classes": 7}),
        ("mixa_deit_tiny_p14", {"keep": (0, 2), "depth": 3, "embed_dim": 48, "img_size": 56, "num_classes": 7}),
        ("mixa_swin_tiny_w14", {"keep": 1, "depths": (2,), "embed_dim": 24, "num_heads": (2,), "num_classes": 7}),
        ("fair_pyramid_p4_pa", {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16, "num_classes": 7}),
        ("deit_tiny_patch16_224", {"depth": 2, "features_only": True, "out_indices": (0, 1)}),
    ],
)
def test_named_models_remember_how_they_were_built(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    model = timm.create_model(name, **args)
    if args.get("features_only"):
        linvit.convert(model, "stella")
    elif not name.startswith("fair"):
        model.reset_classifier(5)
    save(model, tmp_path / "m")
    again = load(tmp_path / "m")
    save(again, tmp_path / "again")
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "m" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    image = torch.randn(1, 3, args.get("img_size", 224), args.get("img_size", 224))
    with torch.no_grad():
        outputs = [m.eval()(image) for m in (model, again)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_converted_twice_dropped_and_half_precision(tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.model.startswith("swin"))
    model = family.build()
    linvit.convert(model, permitting("stella"))
    linvit.convert(model, "softmax")
    model.bfloat16()
    model.head.float()
    save(model, tmp_path / "m", model_args=family.options)
    again = load(tmp_path / "m")
    assert {n: t.dtype for n, t in again.state_dict().items()} == {n: t.dtype for n, t in model.state_dict().items()}
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items())
    assert len(again.linvit_conversions) == 2 and not again.training


def test_saving_again_replaces_and_leaves_other_files(tmp_path: Path) -> None:
    model = converted()
    save(model, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    linvit.convert(model, "softmax")
    save(torch.compile(model), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS, "notes.txt"]
    assert same(model, load(tmp_path), DEIT.image())


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    save(model, tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    linvit.convert(model, "sima")
    monkeypatch.setattr(os, "fsync", full)
    for folder in ("old", "new"):
        with pytest.raises(LinvitError, match=r"cannot write .*No space left"):
            save(model, tmp_path / folder)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(LinvitError, match="is a file"):
        save(model, tmp_path / "file")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(converted(), tmp_path / "m")
    return tmp_path / "m"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


ROW = {"name": "blocks.0.attn", "mechanism": "stella", "options": {}, "grid": None, "dropped": []}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 2, "linvit": "9.1"}, "format 2, written by linvit 9.1; this one reads up to 1: upgrade"),
        ({"format": None}, "not one that linvit.save wrote"),
        ({"model": "deit_tny_patch16_224"}, "unknown model .* did you mean deit_tiny_patch16_224"),
        ({"model": None}, "model of .*config.json must be a word, got None"),
        ({"classes": ["a", 3]}, "classes of .*config.json must be a word, got 3"),
        ({"dtype": "nn"}, "dtype of .*config.json must be one of PyTorch's, got 'nn'"),
        ({"args": {"depht": 2}}, "cannot be built with"),
        ({"args": {"checkpoint_path": "evil.pth"}}, "asks for other weights than its own by 'checkpoint_path'"),
        ({"args": {}}, "the weights do not fit the config, beginning with blocks.0"),
        ({"layers": [3]}, "layers of .*config.json must be a table, got 3"),
        ({"layers": [{**ROW, "mechanism": "stela"}]}, "unknown mechanism 'stela'; did you mean stella"),
        ({"layers": [{**ROW, "name": "blocks.9.attn"}]}, "names the layer blocks.9.attn"),
        ({"layers": [{**ROW, "options": {"kernel": 3}}]}, "unknown option of"),
        ({"layers": [{**ROW, "options": {"local": -1}}]}, "local of stella must be an odd number from 1 to 255 or 0"),
        ({"layers": [{**ROW, "dropped": ["x"]}]}, "unknown feature to drop 'x'"),
        ({"layers": [{**ROW, "grid": [0, 1, 0]}]}, "a token grid needs height and width of at least 1"),
        ({"preprocessing": {"std": [0, 1, 1]}}, "std of .*config.json must be a number from 0.001 to 1000, got 0"),
        ({"preprocessing": {"input_size": [3, -1, 224]}}, "input_size of .* must be a whole number of at least 1"),
        ({"preprocessing": {"interpolation": "bicubc"}}, "did you mean bicubic"),
        ({"conversions": [{"plan": {"version": 2}}]}, "version 2, this linvit reads up to 1"),
        *(
            ({"args": {**VIT, argument: value}}, "cannot be built with|do not fit the config")
            for argument, value in (
                *(("embed_dim", 0), ("embed_dim", "x"), ("depth", 1.5), ("num_heads", 0), ("img_size", [])),
                *(("depth", {}), ("num_classes", -1), ("norm_layer", "x"), ("patch_size", 0)),
            )
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit(saved, **changes)
    with pytest.raises(LinvitError, match=message) as error:
        load(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, args",
    [
        ("deit_tiny_patch16_224", {**VIT, "dynamic_img_size": True, "num_classes": 7}),
        ("qtvit_1_noape", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1), "num_classes": 7}),
    ],
)
def test_what_training_notes_is_saved(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    """Crop, image size and classes; a size for as long as the model is built for the same one."""
    model = timm.create_model(name, **args)
    classes = tuple("abcdefg")
    note(model, crop_pct=0.75, input_size=(3, 96, 96), label_names=classes)
    linvit.convert(model, permitting("stella"))
    save(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / CONFIG).read_text())
    assert config["classes"] == list(classes)
    assert config["preprocessing"]["crop_pct"] == 0.75 and config["preprocessing"]["input_size"] == [3, 96, 96]
    again = load(tmp_path / "m")
    assert again.pretrained_cfg["label_names"] == label_names(again) == classes and own_size(again) == (96, 96)
    save(again, tmp_path / "again")
    assert (tmp_path / "m" / CONFIG).read_bytes() == (tmp_path / "again" / CONFIG).read_bytes()
    if "dynamic_img_size" in args:
        linvit.resample_patches(again, 16, 128)
        assert own_size(again) == (128, 128)
        again.reset_classifier(5)
        assert label_names(again) == ()
        save(again, tmp_path / "again")
        assert "classes" not in json.loads((tmp_path / "again" / CONFIG).read_text())


def test_damaged_and_missing_files_are_one_line(saved: Path) -> None:
    whole = (saved / WEIGHTS).read_bytes()
    for part in (whole[: len(whole) // 2], whole[:4], b""):
        (saved / WEIGHTS).write_bytes(part)
        with pytest.raises(LinvitError, match=r"model.safetensors is damaged"):
            load(saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(LinvitError, match=r"model.safetensors is missing"):
        load(saved)
    (saved / CONFIG).write_text("{")
    with pytest.raises(LinvitError, match=r"config.json is damaged"):
        load(saved)
    (saved / CONFIG).unlink()
    with pytest.raises(LinvitError, match=r"holds no config.json: linvit.save did not write it"):
        load(saved)
    save(converted(), saved / "best")  # as a training leaves it
    with pytest.raises(LinvitError, match=r"holds no config.json: the models of this run are \S+best$"):
        load(saved)
    with pytest.raises(LinvitError, match="there is no folder"):
        load(saved / "nowhere")


def test_an_empty_path_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-o "$DIR"` with DIR not set must not write here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LinvitError, match="an empty path names no place"):
        save(converted(), "")
    assert not list(tmp_path.iterdir())
