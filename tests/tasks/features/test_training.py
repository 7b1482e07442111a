"""A converted backbone learns its original's features from photographs without labels, and what can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import linvit
from linvit.errors import LinvitError, Unreadable
from linvit.tasks.classify.data import open_data
from linvit.tasks.features.kind import Backbones
from linvit.tasks.kinds import kind_of
from linvit.training.logs import read_log
from linvit.training.objectives.final import final_features
from tests.tasks.features.pictures import HERE, QUICK, backbone, write_tiles
from tests.training.toys import same, weights

SHORT = [*QUICK, "epochs=3", "warmup_epochs=0"]
WARNED = pytest.mark.filterwarnings("ignore:.* no splits")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiles(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiles(tmp_path_factory.mktemp("labelled"), labelled=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    linvit.save(backbone(), folder)
    return folder


@pytest.mark.parametrize(("plan", "least"), [("efficient", 0.97), ("xca", 0.8)])
def test_the_features_come_back(photos: Path, plan: str, least: float) -> None:
    """On photographs that were held out, measured again with independent arithmetic."""
    heard: list[dict[str, Any]] = []
    model = backbone()
    found = linvit.train(
        model, photos, task="features", plan=plan, settings=[*QUICK, "epochs=20"], watch=heard.append, **HERE
    )
    notes = [record["text"] for record in heard if record["kind"] == "note"]
    assert f"{photos} has no splits: 9 of its 96 images are held out for validation" in notes
    assert any("final: the loss is how far the final features are" in note for note in notes)
    before, after = next(record for record in heard if record["kind"] == "eval"), found.last
    assert set(after) == {"cosine", "patch_cosine", "class_cosine", "neighbours"}
    for name in ("patch_cosine", "class_cosine"):
        assert after[name] > least and 1 - after[name] < 0.55 * (1 - before[name]), name
    assert after["neighbours"] > before["neighbours"]
    _, held = open_data(photos, unlabelled=True)
    transform = timm.data.create_transform(**{**timm.data.resolve_model_data_config(model), "input_size": (3, 32, 32)})
    images = torch.stack([transform(held[i][0]) for i in range(9)])
    with torch.no_grad():
        ours, theirs = final_features(model.eval(), images), final_features(backbone(), images)
    dots = (ours.patches * theirs.patches).sum(-1) / (ours.patches.norm(dim=-1) * theirs.patches.norm(dim=-1))
    assert float(dots.mean()) == pytest.approx(after["patch_cosine"], abs=1e-3)


@WARNED
def test_killed_and_resumed_to_the_same_bits(photos: Path, original: Path, tmp_path: Path) -> None:
    """In the last stage, with images of two sizes."""
    settings = [*SHORT, "checkpoint_seconds=0", "log_steps=1", "stages.final.sizes=16,32"]
    options: dict[str, Any] = {"plan": "relu_linear", "settings": settings, **HERE}
    flexible = tmp_path / "flexible"
    linvit.save(backbone(dynamic_img_size=True), flexible)

    class Killed(BaseException):
        pass

    def kill(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 11:
            raise Killed

    whole = linvit.train(flexible, photos, output=tmp_path / "whole", **options)
    with pytest.raises(Killed):
        linvit.train(flexible, photos, output=tmp_path / "cut", watch=kill, **options)
    assert not (tmp_path / "cut" / "last").exists()
    again = linvit.train(flexible, photos, output=tmp_path / "cut", resume=True, **options)
    assert again.last == whole.last and again.steps == whole.steps == 15
    for name in ("last", "best"):
        assert same(*(weights(linvit.load(tmp_path / run / name)) for run in ("whole", "cut")))
    stages = [record["stage"] for record in read_log(tmp_path / "cut") if record["kind"] == "train"]
    assert stages == ["align"] + ["blocks"] + ["final"] * 13


def test_saved_loaded_and_judged_again(labelled: Path, original: Path, tmp_path: Path) -> None:
    found = linvit.train(
        original, labelled, "fast", plan="relu_linear", settings=SHORT, output=tmp_path, watch=lambda _: None, **HERE
    )
    assert kind_of(tmp_path / "last").task == kind_of(original).task == "features"
    judged = linvit.evaluate(tmp_path / "last", labelled, teacher=original, **HERE)
    assert judged.metrics() == pytest.approx(found.last) and judged.images == 24
    assert set(found.last) >= {"knn", "probe", "teacher_knn", "teacher_probe"}
    itself = linvit.evaluate(original, labelled, teacher=original, **HERE).metrics()
    assert itself["patch_cosine"] == pytest.approx(1) and itself["neighbours"] == 100
    assert itself["knn"] == itself["teacher_knn"] == found.last["teacher_knn"] > 100 / 6
    assert itself["probe"] == found.last["teacher_probe"]
    alone = linvit.evaluate(tmp_path / "last", labelled, **HERE).metrics()
    assert alone == {name: judged.metrics()[name] for name in ("knn", "probe")}
    seen = linvit.evaluate(tmp_path / "last", labelled, teacher=original, split="train", **HERE)
    assert seen.images == 72 and seen.knn is None, "training images would find themselves"


def test_labels_are_not_learnt_from(labelled: Path, tmp_path: Path) -> None:
    """The same images under other names of classes give the same weights."""
    mixed = write_tiles(tmp_path / "mixed", labelled=True)
    for split in ("train", "val"):
        (mixed / split / "astronaut").rename(mixed / split / "x")
        (mixed / split / "brick").rename(mixed / split / "astronaut")
        (mixed / split / "x").rename(mixed / split / "brick")
    trained = []
    for data in (labelled, mixed):
        train, validation = open_data(data)
        for split in (train, validation):
            order = sorted(range(len(split)), key=lambda i: Path(split.filename(i)).read_bytes())
            split.source, split.labels = split.source.subset(order), split.labels[order]
        model = backbone()
        linvit.train(
            model, (train, validation), plan="relu_linear", settings=[*SHORT[:2], "epochs=1"], watch=print, **HERE
        )
        trained.append(weights(model))
    assert same(*trained)


def test_a_classifier_keeps_its_head(photos: Path) -> None:
    model = backbone(num_classes=5)
    before = model.head.weight.clone()
    found = linvit.train(
        model, photos, task="features", plan="stella", settings=[*QUICK, "epochs=1"], watch=print, **HERE
    )
    assert torch.equal(model.head.weight, before) and found.last["cosine"] > 0.5
    args: dict[str, Any] = {}
    bare = Backbones().start("vit_tiny_patch16_224", None, linvit.recipe("fast"), pretrained=False, args=args)  # type: ignore[arg-type]
    assert args == {"num_classes": 0} and bare.num_classes == 0


@WARNED
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["size=30"], "cannot take images of 30 pixels"),
        (["stages.final.sizes=16,32"], "cannot take images of 16 pixels"),
        (["stages.align.objective=supervised"], "stage align learns answers: leave it out, or choose fast"),
        (["stages.blocks.logits=1"], "distillation and logits are of classifiers: leave it out"),
        (["distillation=soft"], "distillation and logits are of classifiers"),
    ],
)
def test_mistakes_in_settings(photos: Path, settings: list[str], message: str) -> None:
    with pytest.raises(LinvitError, match=message):
        linvit.train(backbone(), photos, plan="relu_linear", settings=[*SHORT, *settings], **HERE)


@WARNED
def test_mistakes_in_data(photos: Path, original: Path, tmp_path: Path) -> None:
    def train(folder: Path, **options: Any) -> None:
        linvit.train(original, folder, **{"plan": "relu_linear", "settings": SHORT, **HERE, **options})

    (tmp_path / "empty").mkdir()
    with pytest.raises(LinvitError, match="empty holds no image"):
        train(tmp_path / "empty")
    with pytest.raises(LinvitError, match="no data at"):
        train(tmp_path / "nowhere")
    cut = write_tiles(tmp_path / "cut")
    whole = (cut / "brick3.png").read_bytes()
    (cut / "brick3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unreadable, match=r"brick3\.png"):
        train(cut)
    with pytest.raises(LinvitError, match="no labels, which kNN and probe need: put images in CLASS folders, or give"):
        linvit.evaluate(original, photos, **HERE)
    with pytest.raises(LinvitError, match="give --plan to learn from the original, --teacher"):
        train(photos, plan=None)
    with pytest.raises(LinvitError, match="unknown recipe of features 'finetune'"):
        train(photos, recipe="finetune")
    with pytest.raises(LinvitError, match="--pyramid is of detectors"):
        train(photos, pyramid="simple")


@WARNED
def test_what_a_reader_makes_of_the_maps_is_learnt(photos: Path) -> None:
    """In place of the maps themselves, which it gets all of, also of a plain ViT."""
    model, asked = backbone(), list[int]()
    torch.manual_seed(0)
    neck = torch.nn.Conv2d(32, 3, 1).requires_grad_(False)

    def reader(maps: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(maps))
        return [neck(maps[0]), maps[1]]

    settings = [*QUICK, "epochs=4", "stages.align.epochs=0", "stages.blocks.epochs=0", "stages.final.features=0"]
    heard: list[dict[str, Any]] = []
    found = linvit.train(
        model, photos, plan="efficient", settings=settings, reader=reader, watch=heard.append, **HERE
    ).last
    before = next(record for record in heard if record["kind"] == "eval")
    assert set(asked) == {2} and {"map1_cosine", "map2_cosine"} <= set(found)
    assert 1 - found["map1_cosine"] < 0.8 * (1 - before["map1_cosine"])
    assert found["map2_cosine"] > before["map2_cosine"]
    classifier = backbone(num_classes=3)
    with pytest.raises(LinvitError, match="a reader is of the task features, and this one is to classify"):
        linvit.train(classifier, photos, plan="efficient", reader=reader, **HERE)
