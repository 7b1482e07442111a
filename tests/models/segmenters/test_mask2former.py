"""Mask2Former against transformers' whole model and loss, its published size, and its targets."""

import pytest
import torch
from torch.nn import functional as F

from linvit.models.backbones import make_backbone
from linvit.models.dense import IGNORED, per_process
from linvit.models.segmenters.mask2former import Mask2Former
from tests.models.segmenters.pictures import CLASSES, Strided, ignored, shapes

transformers = pytest.importorskip("transformers")
SMALL = {"channels": 32, "queries": 8, "pixel_layers": 2, "layers": 3, "heads": 4, "points": 64}


def test_decoders_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    stages = ["stage1", "stage2", "stage3", "stage4"]
    trunk = transformers.SwinConfig(embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2, out_features=stages)
    config = transformers.Mask2FormerConfig(
        backbone_config=trunk, num_labels=CLASSES, feature_size=32, mask_feature_size=32, hidden_dim=32, num_queries=8,
        encoder_layers=2, decoder_layers=4, num_attention_heads=4, train_num_points=64,
    )  # fmt: skip
    theirs = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    ours = Mask2Former(Strided((8, 16, 32, 64)), CLASSES, **SMALL).eval().decoders
    inside = theirs.model
    ours.pixel_decoder.load_state_dict(inside.pixel_level_module.decoder.state_dict())
    ours.query_decoder.load_state_dict(inside.transformer_module.state_dict())
    ours.classifier.load_state_dict(theirs.class_predictor.state_dict())
    images, targets = shapes()
    shown = [target["labels"].unique() for target in targets]
    truths = [(t["labels"] == s[:, None, None]).float() for t, s in zip(targets, shown, strict=True)]
    maps = list(inside.pixel_level_module.encoder(images).feature_maps)
    expected = theirs(images)
    classes, masks = ours(maps)
    assert len(classes) == len(masks) == 4  # before the first layer, and after each of three
    torch.testing.assert_close(classes[-1], expected.class_queries_logits)
    torch.testing.assert_close(masks[-1], expected.masks_queries_logits)
    torch.manual_seed(1)
    found = ours.losses(classes[-1:], masks[-1:], torch.stack([target["labels"] for target in targets]))
    torch.manual_seed(1)
    reference = theirs.get_loss_dict(masks[-1], classes[-1], truths, shown, None)
    names = {"class": "loss_cross_entropy", "mask": "loss_mask", "dice": "loss_dice"}
    torch.testing.assert_close(found, {name: reference[theirs_name] for name, theirs_name in names.items()})
    assert all(loss.requires_grad for loss in found.values())


def test_an_image_without_labels_changes_no_other() -> None:
    torch.manual_seed(0)
    decoders = Mask2Former(Strided(), CLASSES, **SMALL).decoders
    classes, masks = torch.randn(2, 8, CLASSES + 1), torch.randn(2, 8, 16, 16)
    labels = torch.stack([shapes(1)[1][0]["labels"], ignored()["labels"]])
    losses = []
    for images in (1, 2):
        torch.manual_seed(1)
        losses.append(decoders.losses([classes[:images]], [masks[:images]], labels[:images])["class"])
    torch.testing.assert_close(*losses)


def test_positions_keep_their_digits_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 neighbouring rows of a large map would have one position."""
    decoders = Mask2Former(Strided(), CLASSES, **SMALL).eval().decoders
    seen = []
    position = decoders.pixel_decoder.position_embedding
    position.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    sides = zip(Strided().channels, (16, 8, 4, 2), strict=True)
    maps = [torch.randn(1, channels, side, side).bfloat16() for channels, side in sides]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        decoders(maps)
    assert seen == [torch.float32] * 3
    with torch.no_grad():
        decoders.bfloat16()(maps)
    assert seen[3:] == [torch.bfloat16] * 3


def test_scores_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    model = Mask2Former(Strided(), CLASSES, **SMALL).eval()
    images, _ = shapes(1)
    with torch.no_grad():
        classes, masks = model.decoders(model.backbone(images))
        logits = model(images)
    chances, places = classes[-1].softmax(-1), F.interpolate(masks[-1], (64, 64), mode="bilinear").sigmoid()
    for label in range(CLASSES):
        score = sum(chances[0, query, label] * places[0, query] for query in range(8))
        torch.testing.assert_close(logits[0, label].exp(), score)


def test_classes_that_an_image_shows_are_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = Mask2Former(Strided(), CLASSES, **SMALL).decoders
    labels = torch.zeros(1, 4, 4, dtype=torch.long)
    labels[0, 0], labels[0, 1] = 2, IGNORED
    seen = []
    matched = decoders.criterion.matcher.forward

    def watch(masks: torch.Tensor, classes: torch.Tensor, truths: list, shown: list) -> list:
        seen.append((truths, shown))
        return matched(masks, classes, truths, shown)

    monkeypatch.setattr(decoders.criterion.matcher, "forward", watch)
    decoders.losses([torch.randn(1, 8, CLASSES + 1)], [torch.randn(1, 8, 4, 4)], labels)
    ((truths, shown),) = seen
    assert shown[0].tolist() == [0, 2]
    assert torch.equal(truths[0], torch.stack([labels[0] == 0, labels[0] == 2]).float())


def test_masks_are_counted_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert per_process(torch.tensor(0)) == 1
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda count: count.add_(5))  # the other process has 5
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert per_process(torch.tensor(3)) == 4


def test_parameters_are_those_published() -> None:
    """44 M with ResNet-50 and 47 M with Swin-T, as the paper has them."""
    for channels, trunk, published in (
        ((256, 512, 1024, 2048), 23_508_032, 44),
        ((96, 192, 384, 768), 27_520_890, 47),
    ):
        with torch.device("meta"):
            model = Mask2Former(Strided(channels), 150)
        own = sum(p.numel() for part in ("neck", "head") for m in model.parts()[part] for p in m.parameters())
        assert round((trunk + own) / 1e6) == published


def test_parameters_with_the_adapter_are_those_of_castling_vit() -> None:
    """118 M with ViT-B: its 85.8, the decoders' 20.3, and 11.9 of an adapter without the extractors' MLPs."""
    with torch.device("meta"):
        backbone = make_backbone("vit_base_patch16_224", pyramid="adapter", pyramid_args={"mlp_ratio": 0})
        model = Mask2Former(backbone, 150)
    assert sum(p.numel() for p in model.parameters()) == 118_016_951
