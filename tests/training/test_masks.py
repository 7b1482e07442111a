"""Castling's masks are logged for every step and layer and annealed to nothing."""

from __future__ import annotations

from pathlib import Path

import torch

import linvit
from linvit.attention.castling import Castling
from linvit.training.callbacks import Masks, Position
from linvit.training.config import Stage
from linvit.training.logs import read_log
from tests.training.toys import callback, engine, same, small_model, train, weights


def castled(threshold: float | None = 0.1) -> torch.nn.Module:
    model = small_model()
    linvit.convert(model, "castling", size=(8, 8), threshold=threshold)
    return model


def test_the_branch_is_annealed_to_nothing(tmp_path: Path) -> None:
    model = castled()
    train(model, tmp_path, epochs=4, sparse_anneal=0.5, log_steps=3)
    kept = [record["kept"] for record in read_log(tmp_path) if record["kind"] == "train"]
    shares = [row for item in kept for row in item["share"]]
    assert len(shares) == 16 and all(len(row) == 2 for row in shares), "every step, every layer"
    assert kept[0]["layers"] == ["blocks.0.attn", "blocks.1.attn"] and kept[0]["first_step"] == 1
    scales = [item["scale"] for item in kept]
    assert scales[0] == 1 and scales[-1] == 0 and scales == sorted(scales, reverse=True)
    assert all(m.sparse_scale == 0 for m in model.modules() if isinstance(m, Castling))
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():  # what was trained at the end is what is used
        assert torch.allclose(model.train()(images), model.eval()(images), atol=1e-6)


def test_an_empty_mask_loses_nothing(tmp_path: Path) -> None:
    models = [castled(threshold=1.0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, share in zip(models, (0.5, 0.0), strict=True):
        folder = tmp_path / str(share)
        train(model, folder, log_steps=1, sparse_anneal=share)
        assert all(r["kept"]["share"] == [[0, 0]] for r in read_log(folder) if r["kind"] == "train")
    assert same(weights(models[0]), weights(models[1]))


def test_a_second_training_begins_with_the_whole_branch(tmp_path: Path) -> None:
    model = castled()
    for name in "ab":
        train(model, tmp_path / name, sparse_anneal=0.5, log_steps=1)
        assert next(r["kept"]["scale"] for r in read_log(tmp_path / name) if r["kind"] == "train") == 1
    callback(engine(model), Masks).before_step(Position(Stage("train"), 0, 0, 8))
    assert all(m.sparse_scale == 1 for m in model.modules() if isinstance(m, Castling))


def test_scale_is_half_a_cosine() -> None:
    masks = Masks(castled(), anneal=0.4, steps=10)
    assert [round(masks.scale(step), 4) for step in range(5, 10)] == [1, 0.8536, 0.5, 0.1464, 0]
    assert all(Masks(castled(), anneal=0, steps=10).scale(step) == 1 for step in range(10))


def test_annealing_over_the_whole_training(tmp_path: Path) -> None:
    train(castled(), tmp_path, sparse_anneal=1.0, log_steps=1)
    scales = [r["kept"]["scale"] for r in read_log(tmp_path) if r["kind"] == "train"]
    assert scales[0] < 1 and scales[-1] == 0


def test_other_models_have_no_masks() -> None:
    assert callback(engine(small_model("stella")), Masks) is None
