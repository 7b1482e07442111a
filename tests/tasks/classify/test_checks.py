"""A set's classes find a model's outputs: by name, by ImageNet's synsets, by position, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
from PIL import Image
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError
from linvit.tasks.classify.checks import match_classes, match_sets, synsets
from linvit.tasks.classify.data import Images, Stream, open_data


def model_of(outputs: int, names: str = "") -> nn.Module:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, embed_dim=8, depth=1, num_heads=1, num_classes=outputs
    )
    if names:
        note(model, label_names=tuple(names))
    return model


def images_of(*classes: str, labels: tuple[int, ...] | None = None) -> Images:
    """A picture of each class."""
    given = tuple(range(len(classes))) if labels is None else labels
    return Images("set", [(Image.new("L", (4, 4)), label) for label in given], classes=classes, labels=given)


def labels_of(images: Images | Stream) -> list[int]:
    assert isinstance(images, Images) and images.labels is not None
    found = [images[i][1] for i in range(len(images))]
    assert found == images.labels.tolist()
    return found


def test_names_count_and_not_places() -> None:
    model = model_of(4, "abcd")
    found = match_classes(images_of("d", "b"), model, 4)
    assert labels_of(found) == [3, 1] and found.classes == tuple("abcd") and found.class_count == 4
    whole = images_of(*"abcd")
    assert match_classes(whole, model, 4) is whole
    with pytest.raises(LinvitError, match="set has class 'x' and 1 more, which the model does not know: leave out"):
        match_classes(images_of("a", "x", "y"), model, 4)
    unnamed = Images("set", [(Image.new("L", (4, 4)), 2)], labels=[2])
    assert match_classes(unnamed, model, 4) is unnamed


def test_bad_labels_of_a_set_that_knows_them_only_when_read() -> None:
    images = Images("set", [(Image.new("L", (4, 4)), 7)], classes=("d", "b"))
    with pytest.raises(LinvitError, match="set has label 7: labels must run from 0 to 1"):
        match_classes(images, model_of(4, "abcd"), 4)[0]


def test_imagenet_is_known_by_its_synsets() -> None:
    assert synsets(1000)[:2] == ["n01440764", "n01443537"] and synsets(7) == ()
    model = model_of(1000)
    found = match_classes(images_of("n03888257", "n01440764"), model, 1000)
    assert labels_of(found) == [701, 0] and found.classes[217] == "n02102040"
    with pytest.raises(LinvitError, match="set has class 'cat', which the model does not know"):
        match_classes(images_of("n01440764", "cat"), model, 1000)
    others = images_of("n01440764", *(f"n{i:08}" for i in range(999)))  # as many as ImageNet has, yet not ImageNet
    assert match_classes(others, model, 1000) is others


def test_without_names_places_count_where_there_are_as_many() -> None:
    images = images_of("a", "b")
    assert match_classes(images, model_of(2), 2) is images
    for outputs, hint in ((7, "give images of all 7, or take"), (1000, "synset, such as n01440764, or take")):
        with pytest.raises(LinvitError, match=f"set has 2 classes, the model {outputs} outputs, and it .*{hint}"):
            match_classes(images, model_of(outputs), outputs)
    numbers = Images("set", [(Image.new("L", (4, 4)), 2)], labels=[2])
    assert match_classes(numbers, model_of(7), 7) is numbers


def test_training_names_the_outputs() -> None:
    model = model_of(3)
    train, validation = match_sets(images_of("a", "b"), images_of("b"), model, 3)
    assert label_names(model) == ("a", "b", "") and labels_of(train) == [0, 1]
    assert validation is not None and labels_of(validation) == [1]
    again, _ = match_sets(images_of("b", "a"), None, model, 3)  # trained again, on another set
    assert label_names(model) == ("a", "b", "") and labels_of(again) == [1, 0]
    with pytest.raises(LinvitError, match="has class 'c', which the model does not know"):
        match_sets(images_of("a", "c"), None, model, 3)
    fine = model_of(1000)
    assert labels_of(match_sets(images_of("n01443537"), None, fine, 1000)[0]) == [1]
    assert label_names(fine) == tuple(synsets(1000))


def test_unlabelled_training_with_labelled_validation(tmp_path: Path) -> None:
    for place in ("train", "val/n01443537", "val/n02102040"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / place / "a.png")
    _, validation = match_sets(*open_data(tmp_path, unlabelled=True), model_of(1000), 1000)
    assert validation is not None and labels_of(validation) == [1, 217]
    (tmp_path / "val/n01443537").rename(tmp_path / "val/fish")
    (tmp_path / "val/n02102040").rename(tmp_path / "val/dog")
    with pytest.raises(LinvitError, match="has 2 classes, the model 1000 outputs"):
        match_sets(*open_data(tmp_path, unlabelled=True), model_of(1000), 1000)
