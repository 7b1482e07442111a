"""Backbones from the command line: trained, judged and listed as a user does it."""

from __future__ import annotations

from pathlib import Path

import pytest

import linvit as library
from tests.cli.training import Linvit
from tests.tasks.features.pictures import backbone, write_tiles

QUICK = ["--device=cpu", "--workers=0"]
SETTINGS = [*QUICK, "--set=precision=fp32", "--set=batch_size=16", "--set=epochs=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    library.save(backbone(), folder / "original")
    write_tiles(folder / "photos")
    write_tiles(folder / "labelled", labelled=True)
    return folder


def test_train_and_eval(linvit: Linvit, place: Path, tmp_path: Path) -> None:
    original, photos, labelled = (str(place / name) for name in ("original", "photos", "labelled"))
    run = str(tmp_path / "run")
    trained = linvit("train", original, "--task=features", "--data", photos, "--plan=relu_linear", *SETTINGS, "-o", run)
    assert trained.code == 0 and "patch cosine" in trained.out and "neighbours" in trained.out, trained.err
    assert "9 of its 96 images are held out" in trained.err and "kNN" not in trained.out
    judged = linvit("eval", f"{run}/best", "--data", labelled, "--teacher", original, *QUICK)
    assert judged.code == 0 and "cosine with the teacher: patch 0.9" in judged.out, judged.err
    assert "kNN " in judged.out and "probe " in judged.out and ", the teacher " in judged.out
    told = linvit("eval", f"{run}/best", "--data", photos, "--teacher", original, *QUICK, "--json").json
    assert told["images"] == 9 and set(told) >= {"cosine", "patch_cosine", "class_cosine", "neighbours"}
    refused = linvit("eval", f"{run}/best", "--data", photos, *QUICK)
    assert refused.code == 2 and "has no labels, which kNN and probe need" in refused.err.splitlines()[-1]
    refused = linvit("eval", f"{run}/best", "--data", photos, *QUICK, "-o", str(tmp_path / "each.json"))
    assert refused.code == 2 and "--output is for each image's choice" in refused.err


def test_the_task_is_listed(linvit: Linvit) -> None:
    rows = linvit("list", "recipes", "--json").json["recipes"]
    assert [row["name"] for row in rows if row["task"] == "features"] == ["fast"]
    settings = {
        row["name"]: row for row in linvit("list", "settings", "fast", "--task=features", "--json").json["settings"]
    }
    assert settings["stages.final.objective"]["value"] == "final" and "stages.final.sizes" in settings
    odd = linvit("list", "settings", "fast", "--task=feature")
    assert odd.code == 2 and "unknown task 'feature'; did you mean features" in odd.err
