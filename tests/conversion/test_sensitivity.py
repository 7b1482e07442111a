"""Which layers to keep: measured on a small ViT trained on real digits."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.conversion.calibration import calibration_images
from linvit.conversion.sensitivity import measure_sensitivity, output_similarity, passes
from linvit.images import eight_bits


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return pictures, torch.tensor(data.target)


@pytest.fixture(scope="module")
def teacher(digits: tuple[Tensor, Tensor]) -> nn.Module:
    """A ViT of five layers that knows the digits well enough for its layers to differ."""
    torch.manual_seed(0)
    pictures, labels = digits
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=32,
        depth=5,
        num_heads=2,
    )
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(12):
        for rows in torch.randperm(1400).split(50):
            loss = nn.functional.cross_entropy(model(pictures[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert loss < 1.0
    return model.eval()


def test_measured_layers_lose_least(teacher: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    calibration, held_out = digits[0][:256], [digits[0][1400:]]
    state = copy.deepcopy(teacher.state_dict())
    steps: list[int] = []
    found = measure_sensitivity(teacher, [calibration], keep=2, advance=lambda: steps.append(1))
    assert len(steps) == passes(5, 2) == 5 + 1 + 5 + 4
    assert all(torch.equal(tensor, state[name]) for name, tensor in teacher.state_dict().items())
    assert found.images == 256 and len(found.keep) == 2
    assert all(0 < layer.turn < 1 for layer in found.layers)
    reached = [layer.similarity for layer in sorted(found.layers, key=lambda x: x.kept or 99) if layer.kept]
    assert found.similarity < reached[0] < reached[1]

    def similarity(**options: object) -> float:
        student = copy.deepcopy(teacher)
        linvit.convert(student, "mixa", **options)
        return output_similarity(teacher, student, held_out)

    measured = similarity(keep=found.keep)
    for where in ("first", "last", "alternating"):
        assert measured >= similarity(keep=2, where=where) - 1e-6, where
    assert measured > min(similarity(keep=2, where=where) for where in ("first", "last"))


def test_the_reported_similarity_is_the_converted_model_s(teacher: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    batches = [digits[0][:100], (digits[0][100:200], digits[1][100:200])]
    student = copy.deepcopy(teacher)
    report = linvit.convert(student, "mixa", keep=2, calibrate=batches)
    assert report.sensitivity is not None and report.sensitivity.images == 200
    kept = [i for i, block in enumerate(student.blocks) if block.attn.mechanism.name == "relu_quadratic"]
    assert tuple(kept) == report.sensitivity.keep
    last = max(layer.similarity or 0 for layer in report.sensitivity.layers)
    assert output_similarity(teacher, student, batches) == pytest.approx(last, abs=1e-6)


@pytest.mark.parametrize(
    "plan, options, loader, message",
    [
        ("stella", {}, [torch.zeros(1, 1, 8, 8)], "calibrate= measures which layers stella keeps"),
        ("mixa", {"keep": (0, 1)}, [torch.zeros(1, 1, 8, 8)], "keep=<a number>"),
        ("mixa", {"keep": 9}, [torch.zeros(1, 1, 8, 8)], "cannot keep 9 layers: the model has 5"),
        ("mixa", {"keep": 2}, [], "loader is empty"),
        ("mixa", {"keep": 2}, ["cat.jpg"], "must yield image batches"),
        ("mixa", {"keep": 2}, [torch.full((2, 1, 8, 8), float("nan"))], "not finite"),
    ],
)
def test_mistakes(teacher: nn.Module, plan: str, options: dict, loader: list, message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        linvit.convert(teacher, plan, calibrate=loader, **options)
    assert not hasattr(teacher.blocks[0].attn, "mechanism")


def test_images_of_a_folder(tmp_path: Path) -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(LinvitError, match="no folder"):
        next(calibration_images(tmp_path / "none", model))
    with pytest.raises(LinvitError, match="no images"):
        next(calibration_images(tmp_path, model))
    for i in range(5):
        Image.new("RGB", (40, 30), (40 * i, 0, 0)).save(tmp_path / f"{i}.png")
    batches = list(calibration_images(tmp_path, model, images=3, batch=2))
    assert [len(batch) for batch in batches] == [2, 1]
    assert batches[0].shape[1:] == (3, 32, 32)
    flexible = timm.create_model("pvt_v2_b0")  # which does not say for what size it was built
    assert next(calibration_images(tmp_path, flexible, size=(64, 96))).shape == (5, 3, 64, 96)
    for name in ("0.png", "4.png"):
        (tmp_path / name).write_bytes((tmp_path / "1.png").read_bytes()[:40])
    with pytest.raises(LinvitError, match=r"(?s)cannot read 2 images; replace .*/0\.png: .*/4\.png: "):
        list(calibration_images(tmp_path, model, batch=1))


def test_images_for_a_model_of_one_channel(tmp_path: Path) -> None:
    grey = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=1, in_chans=1)
    Image.new("RGB", (32, 32), (200, 0, 0)).save(tmp_path / "0.png")
    (batch,) = calibration_images(tmp_path, grey)
    assert batch.shape == (1, 1, 32, 32)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bits_are_as_bright_as_eight(tmp_path: Path, mode: str) -> None:
    """Pillow's own way from 16 bits makes nearly everything white."""
    small = np.arange(256, dtype=np.uint8).reshape(16, 16)
    kind = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
    wide = Image.frombytes(mode, (16, 16), (small.astype(np.int64) * 257).astype(kind).tobytes())
    assert wide.mode == mode and (np.asarray(eight_bits(wide)) == small).all()


def test_brightness_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    for values in (np.ones((4, 4), np.float32), np.full((4, 4), 70_000, np.int32), np.full((4, 4), -1, np.int32)):
        with pytest.raises(ValueError, match="save it with 8 or 16 bits"):
            eight_bits(Image.fromarray(values))
    few = Image.fromarray(np.full((4, 4), 7, np.int32))
    assert np.asarray(eight_bits(few)).max() == 7


def test_transparent_palettes_come_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    picture = Image.new("RGB", (4, 4), (10, 200, 30)).quantize()
    picture.info["transparency"] = b"\x00" * 4
    assert np.asarray(eight_bits(picture).convert("RGB"))[0, 0].tolist() == [10, 200, 30] and not recwarn.list
