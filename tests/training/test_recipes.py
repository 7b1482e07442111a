"""The recipes hold the papers' values, and every field can be set."""

from __future__ import annotations

from dataclasses import fields

import pytest

from linvit.errors import LinvitError
from linvit.training.config import Config, Stage, override
from linvit.training.recipes import RECIPES, recipe

# What the papers and their code say; a change here is a change of what we call their recipe.
PINNED = {
    ("mixa", "deit_tiny_patch16_224"): {
        **{"epochs": 150, "warmup_epochs": 10, "peak_lr": 1e-4, "weight_decay": 0.05, "batch_size": 512},
        **{"optimiser": "adamw", "schedule": "cosine", "mixup": 0, "cutmix": 0, "erasing": 0.25},
        **{"distillation": "soft", "teacher": None, "loss": "cross_entropy", "randaugment": "rand-m9-mstd0.5-inc1"},
    },
    ("mixa", "deit_small_patch16_224"): {"batch_size": 512, "mixup": 0.8, "cutmix": 1.0},
    ("mixa", "swin_tiny_patch4_window7_224"): {"batch_size": 384, "mixup": 0.8, "cutmix": 1.0},
    ("mixa", "swin_small_patch4_window7_224"): {"batch_size": 256},
    ("castling", "levit_256"): {
        **{"epochs": 1000, "lr": 5e-4, "lr_batch": 512, "weight_decay": 0.025, "clip_agc": 0.01, "drop_path": 0},
        **{"distillation": "token", "teacher": "regnety_160.deit_in1k", "repeats": 3},
    },
    ("castling", "levit_384"): {"drop_path": 0.1, "drop_path_rule": "constant"},
    ("castling", "mvitv2_tiny"): {
        **{"epochs": 300, "peak_lr": 2.5e-4, "weight_decay": 0.05, "clip_norm": 1.0, "batch_size": 256, "min_lr": 1e-6},
        **{"warmup_epochs": 70, "warmup_lr": 1e-8, "warmup_prefix": True, "randaugment": "rand-m9-n6-mstd0.5-inc1"},
        **{"distillation": "none", "ema": None, "repeats": 1, "test_crop": 0.875},
    },
    ("castling", "mvitv2_base"): {"drop_path": 0.3},
    ("castling", "deit_tiny_patch16_224"): {"distillation": "hard", "epochs": 300},
    ("castling", "mobilevit_s"): {"distillation": "hard", "epochs": 300},  # no LeViT, for all its name
    ("castling", "samvit_base_patch16"): {"distillation": "hard", "clip_norm": None},  # no MViT
    ("castling", "castling_levit_128"): {"distillation": "token", "epochs": 1000},
    ("castling", "castling_deit_tiny_distilled"): {"distillation": "token", "epochs": 300},
    ("qtvit", "qtvit_1"): {
        **{"epochs": 320, "warmup_epochs": 20, "warmup_lr": 0, "warmup_prefix": True, "peak_lr": 2e-3},
        **{"weight_decay": 0.1, "no_decay": "norm_and_bias", "clip_value": 2.0, "betas": (0.9, 0.999), "eps": 1e-8},
        **{"random_sizes": (128, 160, 192, 224), "loss": "bce", "label_smoothing": 0.1, "bn_images": 16_000},
        **{"ema": 0.9998, "ema_ramp": 4000, "randaugment": "rand-n1-m3-mstd1.0-inc1", "mixup": 0.1, "cutmix": 0.1},
        **{"erasing": 0, "drop_path": 0.05, "drop_path_rule": "ramped", "mesa": 0, "test_crop": 0.95},
        **{"train_interpolation": "random", "clip_norm": None},
    },
    ("qtvit", "efficientvit_b3"): {
        **{"randaugment": "rand-n2-m6-mstd1.0-inc1", "mixup": 0.3, "drop_path": 0.1, "test_crop": 1.0},
    },
    ("qtvit", "qtvit_4"): {"mesa": 2.0, "mixup": 0.2, "erasing": 0.2, "drop_path_skip": 2, "peak_lr": 1.2e-3},
    ("qtvit", "qtvit_5"): {"mesa": 2.75, "mixup": 0.4, "drop_path_skip": 3, "randaugment": "rand-n2-m5-mstd1.0-inc1"},
    ("qtvit", "qtvit_6"): {"mesa": 3.5, "mesa_start": 0.25, "cutmix": 0.6, "randaugment": "rand-n2-m6-mstd1.0-inc1"},
    ("mobile", ""): {
        **{"lr": 5e-4, "lr_batch": 512, "weight_decay": 0.05, "clip_norm": 1.0, "epochs": 300, "warmup_epochs": 5},
        **{"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "erasing": 0, "batch_size": 768, "drop_path": 0.2},
    },
    ("mobile", "efficientformerv2_s2"): {
        **{
            "warmup_lr": 1e-5,
            "drop_path": 0.02,
            "peak_lr": 1e-3,
            "weight_decay": 0.025,
            "clip_agc": 0.01,
            "distillation": "token",
        },
    },
    ("mobile", "pvt_v2_b3"): {"drop_path": 0.3, "erasing": 0.25, "clip_norm": 1.0},
    ("mobile", "pvt_v2_b0"): {"drop_path": 0.1, "clip_norm": None},
    ("mobile", "mobile_deit_tiny"): {"drop_path": 0.1, "erasing": 0.25, "clip_norm": None, "batch_size": 1024},
    ("fair", ""): {
        **{"peak_lr": 5e-4, "weight_decay": 0.05, "clip_norm": 5.0, "min_lr": 5e-6, "warmup_epochs": 20},
        **{"warmup_lr": 5e-7, "epochs": 300, "cooldown_epochs": 10, "drop_path": 0.2, "colour_jitter": 0.4},
        **{"flip": 0.5, "crop_scale": (0.08, 1.0), "mixup": 0.8, "cutmix": 1.0, "mixup_prob": 1, "mixup_switch": 0.5},
        **{"label_smoothing": 0.1, "erasing": 0.25, "ema": None, "seed": 42, "test_crop": 0.875, "eps": 1e-8},
        **{"train_interpolation": "random", "repeats": 1},
    },
    ("deit", ""): {"lr": 5e-4, "lr_batch": 512, "epochs": 300, "drop_path": 0.1, "ema": 0.99996, "repeats": 3},
}


@pytest.mark.parametrize("name, model", PINNED)
def test_values_are_pinned(name: str, model: str) -> None:
    config = recipe(name, model)
    assert config.recipe == name
    rate = config.scaled(config.lr)
    found = {key: rate if key == "peak_lr" else getattr(config, key) for key in PINNED[name, model]}
    assert found == {key: pytest.approx(v) if isinstance(v, float) else v for key, v in PINNED[name, model].items()}


def test_fast_has_three_stages() -> None:
    config = recipe("fast")
    assert [stage.objective for stage in config.stages] == ["alignment", "features", "supervised"]
    assert sum(stage.epochs for stage in config.stages) == config.epochs
    assert config.needs_teacher
    assert all(config.lr == (stage.lr or config.lr) for stage in config.stages)  # so --set lr=… means all of them


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_where_they_come_from(name: str) -> None:
    text = RECIPES[name].__doc__ or ""
    assert name in ("deit", "finetune", "distil", "fast") or "nferred" in text or "Different from it" in text


def test_every_field_can_be_set() -> None:
    samples = {"recipe": None, "stages": None, "optimiser": "sgd", "schedule": "constant", "no_decay": "nothing"}
    samples |= {"loss": "bce", "distillation": "token", "precision": "fp16", "compile": "off", "mesa": "0"}
    samples |= {"drop_path_rule": "constant", "train_interpolation": "random", "momentum": "0.5", "resize": "longest"}
    for field in fields(Config):
        text = samples.get(field.name, "0.5,0.6" if "tuple[float" in str(field.type) else "1")
        if text is None:
            continue
        if field.type is bool:
            text = "true"
        if field.name == "ema":
            text = "0.5"
        value = getattr(override(Config(), [f"{field.name}={text}"]), field.name)
        assert str(value) in (text, f"{text}.0", f"({text.replace(',', ', ')})", f"({text},)", "True"), field.name


def test_values_are_typed() -> None:
    changed = override(
        Config(clip_norm=1.0), ["clip_norm=none", "random_sizes=96,128", "warmup_prefix=true", "lr=1e-3"]
    )
    assert changed.clip_norm is None and changed.random_sizes == (96, 128) and changed.warmup_prefix
    assert changed.lr == 1e-3 and isinstance(changed.epochs, int)


def test_stages_can_be_set() -> None:
    changed = override(recipe("fast"), ["stages.align.epochs=4", "stages.align.lr=none"])
    assert changed.stages[0] == Stage("align", "alignment", 4, None, "attention") and changed.epochs == 23
    assert [stage.epochs for stage in override(recipe("fast"), ["epochs=5"]).stages] == [0.25, 0.25, 4.5]
    plain = override(recipe("fast"), ["stages.align.epochs=0", "stages.features.epochs=0", "epochs=20"])
    assert [(stage.name, stage.epochs) for stage in plain.stages] == [("finetune", 20)]
    back = override(recipe("fast"), ["stages.align.epochs=0", "stages.align.lr=1", "stages.align.epochs=2"])
    assert back.stages[0].epochs == 2 and back.stages[0].lr == 1
    with pytest.raises(LinvitError, match="no stage of recipe fast is left"):
        override(recipe("fast"), [f"stages.{name}.epochs=0" for name in ("align", "features", "finetune")])


@pytest.mark.parametrize(
    "setting, message",
    [
        ("lr", "--set takes field=value, got 'lr'"),
        ("warmup_epoch=3", "unknown setting 'warmup_epoch'; did you mean warmup_epochs"),
        ("batch_size=1.5", "batch_size=1.5: a whole number expected"),
        ("betas=0.9", "betas=0.9: 2 numbers expected"),
        ("warmup_prefix=yes", "warmup_prefix=yes: true or false expected"),
        ("clip_norm=a", "clip_norm=a: a number or none expected"),
        ("loss=bcee", "unknown loss 'bcee'; did you mean bce?"),
        ("lr=0", "lr=0.0: it must be above 0"),
        ("lr=nan", "lr=nan: it must be above 0"),
        ("drop_path=2", "drop_path=2.0: it must be between 0 and 1"),
        ("clip_norm=-1", "clip_norm=-1.0: it must be 0 or more"),
        ("lr_batch=-5", "lr_batch=-5: it must be above 0"),
        ("stages.align.lr=-1", "stages.align.lr=-1.0: it must be above 0"),
        ("stages.features.fit=-5", "stages.features.fit=-5: it must be 0 or more"),
        ("crop_scale=2,3", "crop_scale=2.0: it must be above 0 and at most 1"),
        ("crop_scale=0.9,0.5", "crop_scale=0.9,0.5: the smaller share comes first"),
        ("betas=0.9,2", "betas=2.0: it must be 0 or more and below 1"),
        ("mixup=nan", "mixup=nan: it must be 0 or more"),
        ("checkpoint_seconds=nan", "checkpoint_seconds=nan: it must be 0 or more"),
        ("seed=-1", "seed=-1: it must be 0 or more and below 2³¹"),
        ("test_crop=0", "test_crop=0.0: it must be above 0"),
        ("random_sizes=128,0", "random_sizes=0: it must be above 0"),
        ("ema=1", "ema=1.0: the decay must lie between 0 and 1"),
        ("mesa=1", "mesa learns from the moving average"),
        ("accumulate=3", "batch_size=64 is not a multiple of accumulate=3"),
        ("muon=(", "muon '(' is no regular expression: missing"),
        ("stages.align.trainable=(", "trainable '(' is no regular expression: missing"),
        ("stages.aling.lr=1", "unknown stage of recipe fast 'aling'; did you mean align?"),
        ("stages.align.epochs=-1", "stage align has -1.0 epochs"),
        ("stages=1", "stages cannot be set"),
    ],
)
def test_mistakes_are_one_line(setting: str, message: str) -> None:
    with pytest.raises(LinvitError) as mistake:
        override(recipe("fast"), [setting])
    assert message in str(mistake.value) and "\n" not in str(mistake.value)


def test_unknown_recipe() -> None:
    with pytest.raises(LinvitError, match="unknown recipe 'mix'; did you mean mixa"):
        recipe("mix")
