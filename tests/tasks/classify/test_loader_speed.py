"""The benchmark of the loaders, on a few small pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from linvit.errors import LinvitError
from linvit.tasks.classify import loader_speed, streaming
from linvit.tasks.classify.loader_speed import CLASSES, make_jpegs, measure_loaders

TINY = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jpegs")
    make_jpegs(made, 2 * CLASSES, (80, 60))
    return made


def test_every_loader_has_a_row(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_speed, "decodes_jpegs", lambda device: True)
    monkeypatch.setattr(streaming, "decodes_jpegs", lambda device: True)
    options = {"batch": 10, "workers": 0, "windows": 1, "device": "cpu"}
    result = measure_loaders(folder, tmp_path / "result.json", **options, **TINY)
    assert json.loads((tmp_path / "result.json").read_text()) == result and result["environment"]["commit"]
    names = [row["loader"] for row in result["rows"]]
    assert names == [
        "none: the step alone",
        "resident",
        "streamed, decoded on the CPU",
        "streamed, decoded on the GPU",
    ]
    assert all(row["slowest"] <= row["images_per_second"] <= row["fastest"] for row in result["rows"])
    assert result["rows"][1]["of_resident"] == 1 and result["grey_levels_from_cpu"]["decoded on the GPU"] < 1
    monkeypatch.setattr(loader_speed, "APART", -1.0)
    with pytest.raises(LinvitError, match="the two decoders differ by"):
        measure_loaders(folder, tmp_path / "other.json", **options, **TINY)


def test_made_pictures_have_a_photographs_size_on_disk(tmp_path: Path) -> None:
    make_jpegs(tmp_path, 2)
    assert all(40_000 < path.stat().st_size < 110_000 for path in tmp_path.rglob("*.jpg"))
