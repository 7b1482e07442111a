"""Checkpoints: the original's load into the converted model, others are refused, and none runs code."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import linvit
from linvit import LinvitError
from tests.conversion.families import FAMILIES, permitting
from tests.conversion.test_saving import DEIT, converted


class Runs:
    """Unpickled, this makes a file: what a hostile checkpoint would do with worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["torch", "plain"])
def test_a_pickle_that_wants_to_run_code_is_refused(form: str, tmp_path: Path) -> None:
    import pickle

    trace, file = tmp_path / "trace", tmp_path / "model.pth"
    model = DEIT.build()
    payload = {"state_dict": model.state_dict(), "extra": Runs(trace)}
    if form == "torch":
        torch.save(payload, file)
    else:
        file.write_bytes(pickle.dumps(payload))
    before = copy.deepcopy(model.state_dict())
    for attempt in (lambda: linvit.load(file), lambda: linvit.load(tmp_path), lambda: linvit.load_weights(model, file)):
        with pytest.raises(LinvitError, match=r"pickle.* may run code") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert not trace.exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_checkpoint_of_the_original_loads_into_the_converted_model(suffix: str, tmp_path: Path) -> None:
    for family in FAMILIES[:3]:
        original = family.build()
        with torch.no_grad():
            for parameter in original.parameters():
                parameter += 1
        file = tmp_path / f"weights.{suffix}"
        if suffix == "pth":
            torch.save({"epoch": 3, "model": {f"module.{k}": v for k, v in original.state_dict().items()}}, file)
        else:
            safetensors.torch.save_file(original.state_dict(), file)
        model = converted(family, "castling")
        linvit.load_weights(model, file)
        linvit.convert(original, permitting("castling"))
        state = {k: v for k, v in model.state_dict().items() if ".mechanism." not in k}
        assert all(torch.equal(original.state_dict()[name], tensor) for name, tensor in state.items())


def test_weights_of_another_model_are_one_line_and_touch_nothing(tmp_path: Path) -> None:
    model = converted()
    before = copy.deepcopy(model.state_dict())
    good = model.state_dict()
    bad = {
        "has no cls_token": {k: v for k, v in good.items() if k != "cls_token"},
        r"has extra, which the model lacks": {**good, "extra": torch.ones(1)},
        r"head.bias is 9, the model's 7": {**good, "head.bias": torch.ones(9)},
    }
    for message, state in bad.items():
        safetensors.torch.save_file(state, tmp_path / "w.safetensors")
        with pytest.raises(LinvitError, match=message):
            linvit.load_weights(model, tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    with pytest.raises(LinvitError, match="damaged"):
        linvit.load_weights(model, tmp_path / "w.safetensors")
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(LinvitError):
        linvit.load_weights(model, tmp_path / "w.pt")
    with pytest.raises(LinvitError, match="no checkpoint"):
        linvit.load_weights(model, tmp_path / "none.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
