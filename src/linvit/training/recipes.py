"""The recipes: functions that return a Config. What is published and what inferred stands in each docstring.

A paper trains its models differently, so a recipe may look at the model's name. Every value can be changed with
`--set field=value`.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from linvit.errors import unknown
from linvit.training.config import Config, Stage
from linvit.training.dense_recipes import DENSE_RECIPES
from linvit.training.feature_recipes import FEATURE_RECIPES

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
REGNET = "regnety_160.deit_in1k"  # the teacher of DeiT and LeViT
# QT-ViT by its base: lr for 128 images, RandAugment (n, m), erasing, mixup, drop path, blocks without it, MESA, crop.
QT = {
    "b1": (2.5e-4, (1, 3), 0.0, 0.1, 0.05, 0, 0.0, 0.95),
    "b2": (2.5e-4, (1, 3), 0.0, 0.1, 0.05, 0, 0.0, 1.0),
    "b3": (2.5e-4, (2, 6), 0.0, 0.3, 0.1, 0, 0.0, 1.0),
    "l1": (1.5e-4, (2, 5), 0.2, 0.2, 0.1, 2, 2.0, 1.0),
    "l2": (1.5e-4, (2, 5), 0.2, 0.4, 0.1, 3, 2.75, 1.0),
    "l3": (1.5e-4, (2, 6), 0.2, 0.6, 0.1, 3, 3.5, 1.0),
}


def deit(model: str = "") -> Config:
    """DeiT without distillation, as its released code trains: the ground several of the papers stand on, so that its
    optimiser and schedule are the defaults of `Config`.

    There the average of the weights is kept beside the weights, which are what is evaluated; here it is what is
    evaluated and saved, so its decay has a ramp that lets it follow short trainings.
    """
    config = Config("deit", lr_batch=512, drop_path=0.1, label_smoothing=0.1, mixup=0.8, cutmix=1.0, erasing=0.25)
    return replace(config, randaugment=RANDAUGMENT, colour_jitter=0.4, repeats=3, ema=0.99996)


def mixa(model: str = "") -> Config:
    """MixA's fine-tune of a converted model, with the pretrained original as the teacher.

    Published: 150 epochs, 10 of warm-up, AdamW, cosine, lr 1e-4, weight decay 0.05; batch 512 (DeiT), 384 (Swin-T),
    256 (Swin-S); cross entropy and Hinton's distillation; RandAugment and erasing alone for DeiT-T, mixup and cutmix as
    in DeiT for the others. Inferred: temperature 2 and equal weights; DeiT's warm-up and final lr, strength of
    RandAugment and drop path, and its label smoothing where there is mixup.
    """
    name = model.lower()
    batch = (384 if "tiny" in name else 256) if "swin" in name else 512
    config = replace(deit(), recipe="mixa", lr=1e-4, lr_batch=None, batch_size=batch, epochs=150, warmup_epochs=10)
    if "deit" in name and "tiny" in name:
        config = replace(config, mixup=0.0, cutmix=0.0, label_smoothing=0.0)
    return replace(config, colour_jitter=0.0, repeats=1, ema=None, distillation="soft", temperature=2.0)


def castling(model: str = "") -> Config:
    """Castling-ViT. No schedule is released, so these are the recipes of the models it converts.

    LeViT's, from its code: 1000 epochs, 256 images a GPU (8 GPUs are inferred), lr 5e-4 for 512 images, weight decay
    0.025, AGC 0.01, hard distillation from RegNetY-16GF, the same drop path in all blocks. MViTv2's, from its configs:
    300 epochs, 70 of warm-up before the cosine, lr 2.5e-4 for the 256 images of a shard, weight decay 0.05, clip 1.0,
    six operations of RandAugment, drop path 0.1, for B 0.3. Others get DeiT's with hard distillation: the baselines in
    the paper's figure are the distilled DeiTs. Where a model has a head for the teacher, as LeViT and the distilled
    DeiTs do, that head learns from it and the other from the labels. That Castling used these recipes is inferred, and
    so is the annealing of its softmax branch, which the paper reports to empty by itself.
    """
    name = model.lower()
    base = replace(deit(), recipe="castling")
    if is_a("mvit", name):
        base = replace(base, lr=2.5e-4, lr_batch=256, batch_size=256, warmup_epochs=70, warmup_lr=1e-8, min_lr=1e-6)
        base = replace(base, warmup_prefix=True, clip_norm=1.0, randaugment="rand-m9-n6-mstd0.5-inc1", repeats=1)
        return replace(base, test_crop=0.875, drop_path=0.3 if "base" in name else 0.1, ema=None)
    kind = "token" if is_a("levit", name) or "distilled" in name else "hard"
    base = replace(base, distillation=kind, teacher=REGNET)
    if is_a("levit", name) or not name:
        base = replace(base, epochs=1000, batch_size=2048, weight_decay=0.025, clip_agc=0.01)
        return replace(base, drop_path=0.1 if "384" in name else 0.0, drop_path_rule="constant")
    return base


def qtvit(model: str = "") -> Config:
    """QT-ViT, from its released configs, which are EfficientViT's; QT-ViT-1 unless the model says otherwise.

    Published: 300 epochs after 20 of warm-up from 0, cosine, AdamW, weight decay 0.1 except where the name has norm or
    bias, gradients clipped at 2.0 number by number, lr 2.5e-4 (B) or 1.5e-4 (L) a GPU of 128 images on 8 GPUs, sizes
    128 to 224 by turns, any interpolation, RandAugment of varying strength, BCE, smoothing 0.1, drop path that grows
    over the blocks and the training, BatchNorm measured again on 16,000 images, EMA 0.9998 with its ramp, MESA for L
    from a quarter of the 300 epochs on, crops of 0.08 to 1, final lr 0. The paper used other EMA decays, which it does
    not give. Different from it: cutmix has one box for all images of a step, there each has its own; erased pixels get
    noise, there zeros; the interpolation is bilinear or bicubic, there one of six; a step's size is made from the crop
    at the full one, there cropped at once.
    """
    name = model.lower()
    order = list(QT)
    wanted = next((i for i, base in enumerate(order) if f"qtvit_{i + 1}" in name or f"_{base}" in name), 0)
    lr, (number, magnitude), erasing, mix, drop_path, skip, mesa, crop = QT[order[wanted]]
    config = Config("qtvit", lr=lr, lr_batch=128, epochs=320, warmup_epochs=20, warmup_lr=0.0, min_lr=0.0)
    config = replace(config, warmup_prefix=True, weight_decay=0.1, no_decay="norm_and_bias", clip_value=2.0)
    config = replace(config, ema=0.9998, ema_ramp=4000, random_sizes=(128, 160, 192, 224), bn_images=16_000)
    config = replace(config, test_crop=crop, train_interpolation="random", erasing=erasing, mixup=mix, cutmix=mix)
    config = replace(config, randaugment=f"rand-n{number}-m{magnitude}-mstd1.0-inc1", label_smoothing=0.1, loss="bce")
    return replace(config, drop_path=drop_path, drop_path_skip=skip, drop_path_rule="ramped", mesa=mesa)


def mobile(model: str = "") -> Config:
    """Mobile-Attention, whose code says only "see Flowformer": Flowformer's for images, or by the model its baseline's.

    Flowformer's, published: AdamW, lr 5e-4 for 512 images, weight decay 0.05, clip 1.0, 300 epochs, 5 of warm-up from
    1e-6, final lr 1e-5, RandAugment m9, mixup 0.8, cutmix 1.0, smoothing 0.1, no erasing, drop path 0.2, 6 GPUs of 128
    images. DeiT's models have DeiT's recipe and PVTv2's too, with a drop path of 0.1, for b3 0.3 and clip 1.0.
    EfficientFormerV2's has lr 1e-3 for 1024 images, warm-up from 1e-5, weight decay 0.025, AGC 0.01, drop path 0, 0.02
    and 0.1, and its second head learns from RegNetY-16GF. That each keeps its baseline's is inferred.
    """
    name = model.lower()
    base = replace(deit(), recipe="mobile", ema=None)
    if "efficientformerv2" in name:
        rates = {"_s0": 0.0, "_s1": 0.0, "_s2": 0.02}
        base = replace(base, drop_path=next((rate for key, rate in rates.items() if key in name), 0.1))
        base = replace(base, lr=1e-3, lr_batch=1024, warmup_lr=1e-5, weight_decay=0.025, clip_agc=0.01)
        return replace(base, distillation="token", teacher=REGNET)
    if "deit" in name or "pvt" in name:
        large = "pvt_v2_b3" in name
        return replace(base, drop_path=0.3 if large else 0.1, clip_norm=1.0 if large else None)
    return replace(base, batch_size=768, clip_norm=1.0, erasing=0.0, repeats=1, drop_path=0.2)


def fair(model: str = "") -> Config:
    """The Fair Comparison, from its training script's defaults, which are Swin-T's.

    Published: AdamW, lr 5e-4 as it is, weight decay 0.05, clip 5.0, cosine to 5e-6, warm-up of 20 epochs from 5e-7, 300
    epochs and 10 at the end, drop path 0.2, mixup 0.8, cutmix 1.0, smoothing 0.1, erasing 0.25, colour jitter 0.4, seed
    42, no EMA, any interpolation, 128 images a GPU. The number of GPUs is not given: 4 is inferred, where this lr is
    Swin's own.
    """
    base = replace(deit(), recipe="fair", seed=42, lr_batch=None, batch_size=512, repeats=1, ema=None, test_crop=0.875)
    base = replace(base, warmup_epochs=20, warmup_lr=5e-7, min_lr=5e-6, cooldown_epochs=10, clip_norm=5.0)
    return replace(base, drop_path=0.2, train_interpolation="random")


def distil(model: str = "") -> Config:
    """Plain distillation of a converted model from its original, short: what `fast` is measured against.

    The papers' fine-tunes, MixA's above all, cut down to 20 epochs, with a higher rate and less augmentation as befits
    so few. The values are this project's own choice.
    """
    config = Config("distil", batch_size=256, epochs=20, warmup_epochs=0.5, min_lr=1e-6, clip_norm=1.0, mixup=0.2)
    config = replace(config, distillation="soft", temperature=2.0, distillation_weight=0.9)
    return replace(config, crop_scale=(0.35, 1.0), eval_epochs=2)


def finetune(model: str = "") -> Config:
    """A pretrained model learns other classes, before it is converted: its head is new, so it cannot be a teacher yet.

    As short as `distil` and with its augmentation, at a fifth of its rate. The values are this project's own choice,
    and not measured on pretrained weights.
    """
    return replace(distil(), recipe="finetune", lr=1e-4, distillation="none", label_smoothing=0.1)


def fast(model: str = "") -> Config:
    """Ours: a converted model gets its accuracy back in minutes, in three stages.

    First every converted layer learns, without labels, to do what its original did on the teacher's inputs, all layers
    at once. Then the linear maps behind them are solved by least squares on a few images, and the features of whole
    blocks and the answers are aligned. All that is short. Most of the time goes into the third, a distilled fine-tune
    with some weight on the features. Small batches help most, and Muon at a high rate for the matrices while all else
    learns at plain distillation's (docs/results.md). The values are this project's own choice.
    """
    stages = (
        Stage("align", "alignment", 1, trainable="attention"),
        Stage("features", "features", 1, logits=1.0, fit=256),
        Stage("finetune", "supervised", 18, features=0.1),
    )
    return replace(distil(), recipe="fast", optimiser="muon", muon_lr=6.0, batch_size=64, stages=stages)


def is_a(family: str, name: str) -> bool:
    """Whether a model's name begins with the family's, or has it after a mark: mobilevit is no levit."""
    return re.search(rf"(^|[^a-z0-9]){family}", name) is not None


RECIPES: dict[str, Callable[[str], Config]] = {
    recipe.__name__: recipe for recipe in (mixa, castling, qtvit, mobile, fair, deit, finetune, distil, fast)
}


def recipe(name: str, model: str = "", task: str = "classify") -> Config:
    """The named recipe's values for a model. Detectors and segmenters, and backbones, have recipes of their own."""
    known = recipes_of(task)
    if name not in known:
        what = {"classify": "recipe", "features": "recipe of features"}.get(task, f"recipe to {task}")
        raise unknown(what, name, known, "linvit list recipes")
    return known[name](model)


def list_recipes(task: str = "classify") -> list[str]:
    """The names of the recipes of a task."""
    return list(recipes_of(task))


def recipes_of(task: str) -> dict[str, Callable[[str], Config]]:
    return {"classify": RECIPES, "features": FEATURE_RECIPES}.get(task, DENSE_RECIPES)
