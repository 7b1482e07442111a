"""`linvit convert` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import linvit as library
from linvit.conversion import as_plan, droppable, surveying
from linvit.conversion.calibration import calibration_images
from linvit.conversion.host import FEATURES
from linvit.conversion.sensitivity import output_similarity
from tests.cli.conftest import Outcome
from tests.conversion.families import FAMILIES

SMALL = ("--no-pretrained", "--model-arg", "depth=3", "--model-arg", "embed_dim=48", "--model-arg", "num_classes=7")
DEIT = "deit_tiny_patch16_224"
SWIN = "swin_tiny_patch4_window7_224"
SMALL_SWIN = (
    *("--no-pretrained", "--model-arg", "depths=[2]", "--model-arg", "embed_dim=24", "--model-arg", "num_heads=[2]"),
)
Run = Callable[..., Outcome]


def mechanisms(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.err
    return [layer["after"] for layer in outcome.json["layers"]]


def test_report_and_folder(linvit: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    outcome = linvit("convert", DEIT, "--plan", "mixa", "--keep", "1", "-o", str(folder), *SMALL)
    assert outcome.code == 0, outcome.err
    assert "plan mixa: 3 of 3 layers changed, 0 new parameters" in outcome.out
    assert "blocks.0.attn" in outcome.out and "relu_quadratic" in outcome.out and "linvit.load(" in outcome.out
    model = library.load(folder)
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 7)


def test_a_dry_run_says_it_and_saves_nothing(linvit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it fetch anything: --no-pretrained is not needed."""
    monkeypatch.chdir(tmp_path)
    asked = ("convert", DEIT, "--plan", "mixa", "--keep", "1", *SMALL)
    dry = linvit(*asked[:-6], *SMALL[1:], "--dry-run", "-o", "out")
    assert dry.code == 0 and "A dry run: nothing was saved." in dry.out and not list(tmp_path.iterdir())
    assert dry.out.splitlines()[:-1] == linvit(*asked, "-o", "out").out.splitlines()[:-1]
    assert linvit(*asked, "--dry-run", "--json").json["output"] is None
    refused = linvit("convert", SWIN, *SMALL_SWIN, "--plan", "stella", "--dry-run")
    assert refused.code == 2 and "--drop relative_bias,shift_mask gives up what it cannot" in refused.err


def test_a_folder_is_not_overwritten_in_silence(linvit: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()  # an empty one is fine
    asked = ("convert", DEIT, *SMALL, "-o", str(folder))
    assert linvit(*asked, "--plan", "stella").code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = linvit(*asked, "--plan", "sima")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"error: {folder} is there and not empty: give another folder, or --overwrite\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert linvit(*asked, "--plan", "sima", "--overwrite").code == 0
    assert library.load(folder).blocks[0].attn.mechanism.name == "sima"


def test_layers_to_keep(linvit: Run) -> None:
    def run(*args: str) -> list[str]:
        return mechanisms(linvit("convert", DEIT, "--dry-run", "--json", *args, *SMALL))

    assert run("--plan", "mixa", "--layers", "0,2") == ["relu_quadratic", "stella", "relu_quadratic"]
    assert run("--plan", "mixa", "--keep", "1", "--where", "last") == ["stella", "stella", "relu_quadratic"]
    assert run("--plan", "mixa:keep=1,where=last") == ["stella", "stella", "relu_quadratic"]
    assert run("--plan", "stella", "--layers", "1") == ["stella", "softmax", "stella"]
    assert run("--plan", "sima:keep=1,where=last") == ["sima", "sima", "softmax"]
    assert run("--plan", "sima", "--keep", "0") == ["sima"] * 3
    assert run("--plan", "sima", "--keep", "2") == ["softmax", "softmax", "sima"]


def test_options_and_plan_files(linvit: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(as_plan("castling", kernel_size=5).to_dict()))
    outputs = []
    for args in (("--plan", "castling", "--option", "kernel_size=5"), ("--plan", str(plan))):
        outcome = linvit("convert", DEIT, *args, "--dry-run", "--json", *SMALL)
        assert outcome.code == 0, outcome.err
        outputs.append({**outcome.json})
    assert outputs[0] == outputs[1] and outputs[0]["new_parameters"] == 3 * 3 * 5


def test_sizes_and_dropped_features(linvit: Run, tmp_path: Path) -> None:
    sizes = ("--patch-size", "14", "--size", "112x140")
    outcome = linvit("convert", DEIT, "--plan", "qt", *sizes, "-o", str(tmp_path / "vit"), "--json", *SMALL)
    assert outcome.code == 0, outcome.err
    vit = library.load(tmp_path / "vit")
    assert vit.patch_embed.grid_size == (8, 10) and vit(torch.randn(1, 3, 112, 140)).isfinite().all()
    assert vit.blocks[0].attn.mechanism.position.table.shape[-2:] == (8, 10)
    command = ("convert", SWIN, "--plan", "stella", "--window-size", "14", "-o", str(tmp_path / "swin"), *SMALL_SWIN)
    outcome = linvit(*command)
    assert outcome.code == 2 and "--drop relative_bias,shift_mask gives up" in outcome.err
    assert not (tmp_path / "swin").exists()
    assert "--drop shift_mask,relative_bias gives up" in linvit(*command, "--drop", "shift_mask").err
    outcome = linvit(*command, "--drop", "relative_bias,shift_mask")
    assert outcome.code == 0 and "gave up relative_bias" in outcome.out
    assert library.load(tmp_path / "swin").layers[0].blocks[0].window_size == (14, 14)


def test_drop_knows_what_every_host_asks_for() -> None:
    asked = droppable(timm.create_model(DEIT, depth=1, attn_drop_rate=0.1))
    for family in FAMILIES:
        asked |= droppable(family.build())
    assert asked == {*FEATURES}


def test_drop_names_what_the_model_has_not(linvit: Run, tmp_path: Path) -> None:
    command = ("convert", DEIT, "--plan=stella", "--drop", " rotary, pooling,", "-o", str(tmp_path), "--json", *SMALL)
    outcome = linvit(*command)
    assert outcome.code == 2 and "drop names rotary, which no layer of this VisionTransformer has" in outcome.err
    assert outcome.err.count("\n") == 1


def test_checkpoint_and_a_saved_folder(linvit: Run, tmp_path: Path) -> None:
    model = timm.create_model(DEIT, depth=3, embed_dim=48, num_classes=7)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    arguments = SMALL[1:]
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    command = ("convert", DEIT, "--plan", "stella", "--checkpoint", str(tmp_path / "w.safetensors"), "-o", first)
    assert linvit(*command, *arguments).code == 0
    assert linvit("convert", first, "--plan", "softmax", "-o", second).code == 0
    refused = linvit("convert", first, "--plan", "softmax", "--dry-run", "--model-arg", "depth=2")
    assert refused.code == 2 and "is a saved model, which is built as it was: leave out --model-arg" in refused.err
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(library.load(second)(image), model.eval()(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "give a MODEL"),
        ((DEIT,), "give --plan PLAN"),
        ((DEIT, "--plan", "mixa"), "give -o DIR"),
        (("deit_tny_patch16_224", "--plan", "mixa", "-o", "x"), "did you mean deit_tiny_patch16_224"),
        (("runs/nope/best", "--plan", "mixa", "-o", "x"), "error: model 'runs/nope/best': there is no such folder"),
        (("zzz", "--plan", "mixa", "-o", "x"), "more"),
        ((DEIT, "--plan", "mixe", "-o", "x"), "did you mean mixa"),
        ((DEIT, "--plan", "mixa", "--keep", "4", "-o", "x"), "cannot keep 4 layers: the model has 3"),
        ((DEIT, "--plan", "mixa", "--keep", "4", "--layers", "1", "-o", "x"), "give one of the two"),
        ((DEIT, "--plan", "mixa", "--layers", "1;2", "-o", "x"), "whole numbers with commas"),
        (
            (DEIT, "--plan", "mixa", "--keep", "1", "--where", "middle", "-o", "x"),
            "unknown where of plan mixa 'middle'",
        ),
        ((DEIT, "--plan", "mixa", "--where", "last", "-o", "x"), "--where places the layers that --keep counts"),
        ((DEIT, "--plan", "mixa", "--where", "first", "--layers", "1", "-o", "x"), "give --keep too"),
        ((DEIT, "--plan", "mixa", "--keep", "1", "--option", "keep=2", "-o", "x"), "layers to keep are given twice"),
        ((DEIT, "--plan", "mixa:keep=2", "--keep", "1", "-o", "x"), "keep of plan mixa is given twice"),
        ((DEIT, "--plan", "mixa:keep=2", "--option", "keep=1", "-o", "x"), "keep of plan mixa is given twice"),
        ((DEIT, "--plan", "mixa", "--layers", "1", "--option", "where=last", "-o", "x"), "keep lists its layers"),
        ((DEIT, "--plan", "efficient", "--drop", "nosuch", "-o", "x"), "unknown feature to drop 'nosuch'; known: "),
        (
            (DEIT, "--plan", "mixa", "--drop", "rotary,relativ_bias", "-o", "x"),
            "'relativ_bias'; did you mean relative_bias",
        ),
        ((DEIT, "--plan", "stella", "--option", "eps", "-o", "x"), "expected --option name=value"),
        ((DEIT, "--plan", "stella", "--size", "22a", "-o", "x"), "such as 224 or 224x320"),
        ((DEIT, "--plan", "stella", "--patch-size", "15", "-o", "x"), "cannot be cut into patches of 15"),
        ((DEIT, "--plan", "stella", "--window-size", "14", "-o", "x"), "no windows"),
        ((DEIT, "--plan", "none.json", "-o", "x"), "cannot read the plan none.json"),
        ((DEIT, "--plan", "stella", "--checkpoint", "none.pth", "-o", "x"), "there is no checkpoint none.pth"),
        ((DEIT, "--plan", "stella", "--model-arg", "depht=2", "-o", "x"), "cannot be built with"),
        (("resnet18", "--plan", "stella", "--no-pretrained", "-o", "x"), "no attention that linvit can swap"),
        (("qtvit_1", "--plan", "stella", "--pretrained", "-o", "x"), "no weights are published for qtvit_1"),
    ],
)
def test_mistakes_are_one_line(
    linvit: Run, args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = SMALL if DEIT in args else ()
    outcome = linvit("convert", *args, *small)
    assert outcome.code == 2 and message in outcome.err
    assert outcome.err.count("\n") == 1 and len(outcome.err) < 300 and not list(tmp_path.iterdir())


def test_hub_out_of_reach(linvit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub\nmore\nlines")

    monkeypatch.setattr(timm, "create_model", unreachable)
    outcome = linvit("convert", DEIT, "--plan", "stella", "-o", str(tmp_path / "x"))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert f"cannot get the pretrained weights of {DEIT} (" in outcome.err
    assert outcome.err.endswith("); give --checkpoint FILE or --no-pretrained\n")


def test_survey(linvit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["deit", "levit"]
    monkeypatch.setattr(surveying, "families", lambda: names)
    rows = linvit("convert", "--survey", "--json").json
    assert [row["family"] for row in rows] == names
    assert set(rows[0]) == {"family", "example", "status", "reason"} and rows[0]["status"] == "converted"
    text = linvit("convert", "--survey").out
    assert "2 families: 2 converted, 0 partly, 0 refused." in text


def test_calibration_says_which_layers_it_kept(linvit: Run, tmp_path: Path) -> None:
    photos, bars = tmp_path / "photos", tmp_path / "bars.png"
    photos.mkdir()
    for name in ("china.jpg", "flower.jpg"):
        Image.fromarray(load_sample_image(name)).save(photos / name)
    args = ("--plan=mixa", "--keep=1", f"--calibrate={photos}", f"--plot={bars}", "-o", str(tmp_path / "out"))
    outcome = linvit("convert", DEIT, *args, "--json", *SMALL)
    names = mechanisms(outcome)
    measured = [layer["index"] for layer in outcome.json["sensitivity"]["layers"] if layer["kept"]]
    assert measured == [i for i, name in enumerate(names) if name == "relu_quadratic"] and len(measured) == 1
    assert bars.stat().st_size > 5000
    again = linvit("convert", DEIT, *args, "--overwrite", *SMALL)
    assert "“turn”" in again.out and "2 images" in again.out


def test_calibration_keeps_the_options_of_the_plan(linvit: Run, tmp_path: Path) -> None:
    photos, weights = tmp_path / "photos", tmp_path / "w.safetensors"
    photos.mkdir()
    for name in ("china.jpg", "flower.jpg"):
        Image.fromarray(load_sample_image(name)).save(photos / name)
    original = timm.create_model(DEIT, depth=3, embed_dim=48, num_classes=7).eval()
    safetensors.torch.save_file(original.state_dict(), weights)
    args = ("--plan=mixa", "--keep=1", "--option=local=3", f"--calibrate={photos}", f"--checkpoint={weights}")
    outcome = linvit("convert", DEIT, *args, "-o", str(tmp_path / "out"), "--json", *SMALL[1:])
    assert sorted(mechanisms(outcome)) == ["relu_quadratic(local=3)", "stella(local=3)", "stella(local=3)"]
    assert outcome.json["new_parameters"] > 0
    model = library.load(tmp_path / "out")
    assert all(block.attn.mechanism.conv.kernel_size == 3 for block in model.blocks)
    kept = [layer for layer in outcome.json["sensitivity"]["layers"] if layer["kept"]]
    assert [block.attn.mechanism.name for block in model.blocks].index("relu_quadratic") == kept[0]["index"]
    reached = output_similarity(original, model, calibration_images(photos, original))
    assert reached == pytest.approx(kept[0]["similarity"], abs=1e-5)


def test_calibration_names_a_file_that_breaks_off(linvit: Run, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("china.jpg", "flower.jpg"):
        Image.fromarray(load_sample_image(name)).save(photos / name)
    whole = (photos / "flower.jpg").read_bytes()
    (photos / "flower.jpg").write_bytes(whole[: len(whole) // 2])
    args = ("--plan", "mixa", "--keep", "1", "--calibrate", str(photos), "-o", str(tmp_path / "out"))
    outcome = linvit("convert", DEIT, *args, *SMALL)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert f"cannot read image {photos / 'flower.jpg'}: " in outcome.err


@pytest.mark.parametrize(
    "args, message",
    [
        (("--plan", "stella", "--calibrate", "."), "calibrate= measures which layers stella keeps"),
        (("--plan", "mixa", "--plot", "bars.png"), "--plot draws what --calibrate measures"),
        (("--plan", "mixa", "--calibrate", ".", "--keep", "1", "--where", "last"), "give keep=<a number>"),
        (("--plan", "mixa", "--calibrate", ".", "--option", "keep=[1]"), "give keep=<a number>"),
        (("--plan", "mixa", "--calibrate", ".", "--layers", "1"), "give keep=<a number>"),
        (("--plan", "mixa", "--calibrate", ".", "--keep", "1", "--option", "lokal=3"), "option of plan mixa 'lokal'"),
        (("--plan", "mixa", "--calibrate", "nowhere"), "nowhere is no folder of images"),
    ],
)
def test_calibration_mistakes(linvit: Run, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    outcome = linvit("convert", DEIT, *args, "-o", str(tmp_path / "out"), *SMALL)
    assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
