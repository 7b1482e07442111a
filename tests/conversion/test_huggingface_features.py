"""What is asked of Hugging Face's models beside the conversion itself: features, distances and times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import linvit
from linvit import LinvitError
from linvit.conversion.dry_run import without_head
from linvit.conversion.planning import Setting, study
from linvit.training.objectives.final import final_features
from tests.conversion.hugging import BY_NAME, CASES, SMALL, Case, transformers
from tests.tasks.features.pictures import HERE, QUICK, write_tiles

CLASSIFIER = Case("ViTForImageClassification", "ViTConfig", {"num_labels": 5})
TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32, "vocab_size": 50}


def clip() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(vision_config=SMALL, text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2})
    return transformers.CLIPModel(config).eval()


@pytest.mark.parametrize("case", [case for case in CASES if case.inputs is None], ids=str)
def test_features_are_the_last_hidden_state_without_prefix(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        found, wanted = final_features(model, case.image()), case.out(model)
    if wanted.ndim == 4:  # SAM 2's has the channels last
        wanted = wanted.flatten(1, 2) if "Sam2" in case.model else wanted.flatten(2).transpose(1, 2)
    assert torch.equal(found.patches, wanted[:, case.prefix or 0 :]) and found.image.shape == wanted[:, 0].shape


def test_what_reads_sam_2_is_part_of_its_features() -> None:
    case = BY_NAME["Sam2HieraDetModel"]
    neck = {
        "backbone_config": case.build().config,
        "backbone_channel_list": [48, 24, 12],
        "fpn_hidden_size": 16,
        "fpn_top_down_levels": [2],
    }
    config = transformers.Sam2VisionConfig(backbone_feature_sizes=[[16] * 2, [8] * 2, [4] * 2], **neck)
    model = transformers.Sam2VisionModel(config).eval()
    with torch.no_grad():
        found, wanted = final_features(model, case.image()), model(case.image())
    assert len(found.maps) == len(wanted.fpn_hidden_states) == 3
    for ours, theirs in zip(found.maps, wanted.fpn_hidden_states, strict=True):
        assert torch.equal(ours, theirs.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("case", [CLASSIFIER, *(BY_NAME[f"{n}Model"] for n in ("DINOv3ViT", "Siglip2Vision"))], ids=str)
def test_plans_by_times_and_distances(case: Case) -> None:
    model = case.build()
    setting = Setting((case.side, case.side), torch.device("cpu"), budget=0.001)
    found = study(model, setting, candidates=("stella",), loader=[case.image()], images=2, points=2)
    assert all(layer.ms > 0 and 0 < (layer.options[0].turn or 0) < 2 for layer in found.layers)
    report = linvit.convert(model, "stella", keep=1, calibrate=[case.image()])
    assert report.sensitivity is not None and len(report.sensitivity.keep) == 1


def test_dinov3_calls_its_encoder_its_base() -> None:
    model, classifier = BY_NAME["DINOv3ViTModel"].build(), CLASSIFIER.build()
    assert without_head(model) is model and without_head(classifier) is classifier.vit


def test_the_part_that_sees_is_trained_saved_and_judged(tmp_path: Path) -> None:
    photos, model = write_tiles(tmp_path / "photos"), clip()
    settings = [*QUICK, "epochs=1", "stages.align.epochs=0", "stages.blocks.epochs=0"]
    options = {"plan": "stella", "settings": settings, "output": tmp_path / "run", "watch": lambda _: None, **HERE}
    trained = linvit.train(model, photos, **options)
    assert type(trained.model) is transformers.CLIPVisionModel
    judged = linvit.evaluate(tmp_path / "run" / "last", photos, teacher=clip(), watch=lambda _: None, **HERE)
    assert judged.metrics() == pytest.approx(trained.last, abs=1e-5) and judged.images == 9
    with pytest.raises(LinvitError, match="takes patches, and pictures are fed here"):
        linvit.train(BY_NAME["Siglip2VisionModel"].build(), photos, **{**options, "output": None})
