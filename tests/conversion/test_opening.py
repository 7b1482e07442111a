"""Models by name, and the way back from a converted one to the model it was made from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torchvision.models import VisionTransformer

import linvit
from linvit import LinvitError
from linvit.conversion import Source, open_model, open_original
from linvit.conversion.saving import CONFIG

NAME, SMALL = "deit_tiny_patch16_224", {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3}


def random_model() -> torch.nn.Module:
    return open_model(NAME, pretrained=False, args=SMALL)


def test_a_converted_folder_finds_the_checkpoint_or_the_folder_it_was_made_from(tmp_path: Path) -> None:
    weights, first = tmp_path / "weights.safetensors", random_model()
    safetensors.torch.save_file(first.state_dict(), weights)
    linvit.save(first, tmp_path / "first")
    made = {
        "checkpoint": open_model(NAME, args=SMALL, checkpoint=weights),
        "folder": open_model(str(tmp_path / "first")),
    }
    for kind, model in made.items():
        linvit.convert(model, "stella")
        linvit.save(model, tmp_path / kind)
        again = linvit.load(tmp_path / kind)
        linvit.convert(again, "softmax")  # the original is what the first conversion began with
        original = open_original(again, kind)
        assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in first.state_dict().items())
    weights.unlink()
    with pytest.raises(LinvitError, match=r"x was made from .*weights.safetensors, which is gone: give --teacher"):
        open_original(linvit.load(tmp_path / "checkpoint"), "x")


def test_what_is_not_known_is_one_line(tmp_path: Path) -> None:
    model = random_model()
    with pytest.raises(LinvitError, match="give --plan to learn from the original, --teacher"):
        open_original(model, "x")
    linvit.convert(model, "stella")
    with pytest.raises(LinvitError, match="x was made from random weights: give --teacher"):
        open_original(model, "x")
    del model.linvit_source
    model.linvit_conversions = []
    linvit.convert(model, "stella")
    with pytest.raises(LinvitError, match="x was made from a model that is not known"):
        open_original(model, "x")
    linvit.save(model, tmp_path / "m")
    assert "source" not in json.loads((tmp_path / "m" / CONFIG).read_text())["conversions"][0]


def test_an_unreachable_hub_is_one_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, without the hub's own minute of retries; what lies in the cache is not asked for at all."""
    from huggingface_hub import constants, utils

    asked = []

    class Nowhere:
        def head(self, address: str, timeout: float) -> None:
            asked.append((address, timeout))
            raise OSError("no route to host")

    monkeypatch.setattr(utils, "get_session", Nowhere)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(LinvitError) as error:
        open_model(NAME)
    assert str(error.value) == (
        f"cannot get the pretrained weights of {NAME} (the Hugging Face hub cannot be reached and its cache does not "
        "hold them); give --no-pretrained"
    )
    assert len(asked) == 1 and asked[0][1] <= 5 and time.monotonic() - begun < 5
    assert constants.HF_HUB_OFFLINE is False


def test_convert_says_what_it_cannot_take() -> None:
    with pytest.raises(LinvitError, match=r"takes a model, not 'deit_x': build it with timm.create_model\('deit_x'"):
        linvit.convert("deit_x", "stella")  # type: ignore[arg-type]
    with pytest.raises(LinvitError, match=r"takes a model, not int$"):
        linvit.convert(3, "stella")  # type: ignore[arg-type]
    with pytest.raises(LinvitError, match="Linear has no attention that linvit can swap"):
        linvit.convert(torch.nn.Linear(2, 2), "stella")
    theirs = VisionTransformer(32, 16, 1, 2, 8, 8)
    with pytest.raises(LinvitError, match=r"torchvision's VisionTransformer .* \(MultiheadAttention\): .* from timm"):
        linvit.convert(theirs, "stella")


def test_a_name_that_opens_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LinvitError, match="did you mean deit_tiny_patch16_224"):
        open_model("deit_tiny_patch16_22", pretrained=False)
    with pytest.raises(LinvitError, match=r"cannot be built with {'depht': 1}"):
        open_model(NAME, pretrained=False, args={"depht": 1})
    linvit.save(random_model(), tmp_path / "m")
    with pytest.raises(LinvitError, match="leave out --model-arg"):
        open_model(str(tmp_path / "m"), args={"depth": 1})
    assert open_model(str(tmp_path / "m")).linvit_source == Source(folder=str((tmp_path / "m").resolve()))
