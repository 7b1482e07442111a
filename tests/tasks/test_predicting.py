"""`linvit.predict`: answers in the image's own pixels, whatever its size and however it lies."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import linvit
from linvit.conversion.opening import open_model
from linvit.conversion.saving import note
from linvit.errors import LinvitError
from linvit.models import DenseModel
from linvit.tasks import Classified, Detected, Segmented, predict, predicting
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.dense import transforms
from tests.dense_fixture import CATEGORIES, photographs

HERE: dict[str, Any] = {"device": "cpu"}
CATS = photographs(96)[1]


class Known(DenseModel):
    """Answers what it was told to, for images of 32 pixels."""

    num_classes = len(CATEGORIES)

    def __init__(self, task: str, answer: Any) -> None:
        super().__init__()
        self.task, self.answer = task, answer  # type: ignore[misc]
        self.weight = torch.nn.Parameter(torch.zeros(1))
        note(self, input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, label_names=CATEGORIES, crop_mode="squash")

    def forward(self, images: Tensor, targets: Any = None) -> Any:
        assert images.shape == (1, 3, 32, 32) and not self.training
        return self.answer


def detections() -> list[dict[str, Tensor]]:
    boxes = torch.tensor([[0.0, 0, 16, 8], [8, 8, 40, 32], [0, 0, 4, 4]])
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, :8, :16] = True
    scores, labels = torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0, 3, 1])
    return [{"boxes": boxes, "scores": scores, "labels": labels, "masks": masks}]


def test_boxes_and_masks_in_the_images_pixels() -> None:
    picture = Image.new("RGB", (96, 64))
    (found,) = predict(Known("detect", detections()), picture, **HERE)
    assert isinstance(found, Detected) and found.size == (64, 96) and found.masks is not None
    assert [(name, round(score, 3), box) for name, score, box in found.objects] == [
        ("cat", 0.9, (0, 0, 48, 16)),
        ("person", 0.6, (24, 16, 96, 64)),
    ]
    assert found.masks[0, :16, :48].all() and found.masks[0].sum() == 16 * 48
    assert len(predict(Known("detect", detections()), picture, threshold=0.2, **HERE)[0].objects) == 3  # type: ignore
    assert found.draw().size == (96, 64) and found.draw().tobytes() != picture.tobytes()
    nothing = predict(Known("detect", detections()), picture, threshold=0.95, **HERE)[0]
    assert isinstance(nothing, Detected) and not nothing.objects and nothing.draw().tobytes() == picture.tobytes()


def test_labels_a_few_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, len(CATEGORIES), 32, 32)
    wanted = F.interpolate(logits, (50, 70), mode="bilinear")[0].argmax(0)
    picture = Image.new("RGB", (70, 50))
    for at_once in (transforms.AT_ONCE, 2 * 50 * 70, 1):
        monkeypatch.setattr(transforms, "AT_ONCE", at_once)
        (found,) = predict(Known("segment", logits), picture, **HERE)
        assert isinstance(found, Segmented) and torch.equal(found.labels, wanted)
    assert sum(found.shares.values()) == pytest.approx(1) and list(found.shares.values()) == sorted(
        found.shares.values(), reverse=True
    )
    with pytest.raises(LinvitError, match="NaN"):
        predict(Known("segment", logits * float("nan")), picture, **HERE)


def test_files_as_exif_turns_them(tmp_path: Path) -> None:
    """An image that lies on its side is seen, answered and drawn upright; a folder is its images."""
    seen: list[Tensor] = []

    class Watching(Known):
        def forward(self, images: Tensor, targets: Any = None) -> Any:
            seen.append(images)
            return super().forward(images, targets)

    exif = Image.Exif()
    exif[0x0112] = 6
    upright = CATS.picture
    upright.save(tmp_path / "a.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b ü.png", exif=exif)
    (tmp_path / "notes.txt").write_text("no image")
    model = Watching("segment", torch.zeros(1, len(CATEGORIES), 32, 32))
    found = predict(model, tmp_path, **HERE)
    assert [one.size for one in found] == [(upright.height, upright.width)] * 2 and torch.equal(*seen)
    assert [Path(str(one)).name for one in found] == ["a.png", "b ü.png"]
    assert found[0].draw().tobytes() == found[1].draw().tobytes()
    with pytest.raises(LinvitError, match=r"cannot read image .*notes\.txt"):
        predict(model, tmp_path / "notes.txt", **HERE)
    with pytest.raises(LinvitError, match="there is no image"):
        predict(model, [tmp_path / "c.png"], **HERE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LinvitError, match="there is no image in"):
        predict(model, tmp_path / "empty", **HERE)
    with pytest.raises(LinvitError, match=r"bytes \(3, height, width\)"):
        predict(model, torch.zeros(3, 8, 8), **HERE)


def test_a_classifier(tmp_path: Path) -> None:
    """The probabilities of the model on its own transform's output, by the names it was trained on."""
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **shape).eval()
    torch.nn.init.normal_(model.head.weight)
    names = tuple("abcdefg")
    note(model, label_names=names)
    (found,) = predict(model, CATS.picture, **HERE)
    how = Preprocessing.of(model)
    pixels = (how.evaluation()(CATS.picture) / 255 - torch.tensor(how.mean)[:, None, None]) / torch.tensor(how.std)[
        :, None, None
    ]
    with torch.no_grad():
        wanted = model(pixels[None])[0].softmax(-1)
    assert isinstance(found, Classified) and len(found.classes) == 5
    assert [name for name, _ in found.classes] == [names[i] for i in wanted.argsort(descending=True)[:5]]
    assert found.classes[0][1] == pytest.approx(float(wanted.max()), abs=1e-5)
    with pytest.raises(LinvitError, match="cannot be drawn"):
        found.draw()
    with pytest.raises(LinvitError, match="cannot take images of 48 pixels"):
        predict(model, CATS.picture, size=48, **HERE)
    assert predicting.class_names(timm.create_model("test_vit", num_classes=3)) == ("class 0", "class 1", "class 2")
    assert predicting.class_names(timm.create_model("test_vit"))[0].startswith("tench")


def test_as_in_training(tmp_path: Path) -> None:
    """A saved segmenter, its trunk converted, answers as the loaded model on the batch that evaluation makes."""
    trunk = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    args = {"backbone": "vit_tiny_patch16_224", "backbone_args": trunk, "num_classes": 5, "channels": 16}
    torch.manual_seed(0)
    model = open_model("semantic_fpn", pretrained=False, args=args)
    linvit.convert(model, "stella")
    note(model, input_size=(3, 64, 64), crop_mode="border", label_names=CATEGORIES)
    linvit.save(model, tmp_path / "saved", model_name="semantic_fpn", model_args=args)
    (found,) = predict(tmp_path / "saved", CATS.picture, **HERE)
    assert isinstance(found, Segmented) and found.labels.shape == (CATS.picture.height, CATS.picture.width)
    from linvit.tasks.dense.fitting import trained_settings
    from linvit.tasks.dense.loading import batch_of
    from linvit.tasks.dense.transforms import to_original

    loaded = linvit.load(tmp_path / "saved")
    settings = trained_settings(loaded)
    assert settings.resize == "longest" and settings.size == 64
    images, targets = batch_of([predicting.opened(CATS.picture)], settings)
    with torch.no_grad():
        wanted = to_original(loaded(images, targets)[0], targets[0]).argmax(0)
    assert torch.equal(found.labels, wanted)
