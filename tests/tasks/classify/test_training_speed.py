"""The speed of each loader, on a few small pictures; `tests/cli/test_bench_training.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from linvit.errors import LinvitError
from linvit.tasks.classify import streaming, training_speed
from linvit.tasks.classify.data import open_data
from linvit.tasks.classify.fitting import Sets
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.streaming import Streamed
from linvit.training.config import override
from linvit.training.recipes import recipe

TINY = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 1, "num_classes": 10}
CONFIG = override(recipe("deit"), ["batch_size=10", "precision=fp32"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jpegs")
    training_speed.make_jpegs(made, 20, copies=2, size=(80, 60))
    return made


def test_every_loader_is_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (training_speed, streaming):
        monkeypatch.setattr(module, "decodes_jpegs", lambda device: True)
    sets = training_speed.loaders_for(Sets(open_data(str(folder))[0]), torch.device("cpu"))
    assert list(sets) == list(training_speed.LOADERS) and list(sets)[2].endswith("GPU")
    rows = {}
    for name, each in sets.items():
        model = timm.create_model("vit_tiny_patch16_224", **TINY)
        loading = name != training_speed.STEP_ALONE
        rows[name] = training_speed.training_speed(model, each, CONFIG, steps=75, device="cpu", loading=loading)
    for row in rows.values():
        assert row["status"] == "ok" and row["windows"]["low"] <= row["images_per_second"] <= row["windows"]["high"]
    streamed = rows["streamed, decoded on the GPU"]
    assert streamed["grey_levels_from_cpu"] < 1
    monkeypatch.setattr(training_speed, "APART", -1.0)
    with pytest.raises(LinvitError, match="the two decoders differ by"):
        training_speed.training_speed(model, sets["streamed, decoded on the GPU"], CONFIG, device="cpu")


def test_without_loading_all_steps_have_one_batch(folder: Path) -> None:
    images = open_data(str(folder))[0]
    source = Streamed(images, Preprocessing((32, 32)), 10, 10)
    batches = list(training_speed.OneBatch(source).epoch(0, 1))
    assert len(batches) == source.batches - 1 and all(batch is batches[0] for batch in batches)


def test_made_pictures_have_a_photographs_size_on_disk(tmp_path: Path) -> None:
    training_speed.make_jpegs(tmp_path, 2, copies=2)
    files = list(tmp_path.rglob("*.jpg"))
    assert len(files) == 4 and all(40_000 < path.stat().st_size < 110_000 for path in files)


def test_a_closed_loader_leaves_no_workers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor do those of the next one complain that they have inherited it."""
    images = open_data(str(folder))[0]
    for _ in range(2):
        source = Streamed(images, Preprocessing((32, 32)), 4, 10, augmentation=Augmentation(), workers=2)
        for epoch in range(2):
            next(source.epoch(epoch))
        workers = source.kept._iterator._workers
        source.close()
        assert not any(worker.is_alive() for worker in workers) and source.kept is None
        assert len(list(source.epoch(0))) == source.batches  # it can be read again
        source.close()
        source.close()
    assert not capfd.readouterr().err
