"""The recipes of detectors and segmenters. What is published and what inferred stands in each docstring.

The papers count iterations; here they are epochs of the paper's own set, COCO's 118,287 or ADE20K's 20,210 training
images, so that a recipe has a meaning on other sets.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linvit.training.config import Config, Stage

COCO, ADE = 118_287, 20_210  # training images
THREE_TIMES: dict[str, Any] = {"epochs": 36, "schedule": "step", "milestones": (27 / 36, 33 / 36)}  # the "3x" schedule


def iterations(count: int, images: int, batch: int = 16) -> float:
    """So many steps as epochs."""
    return round(count * batch / images, 3)


def base(name: str) -> Config:
    """What all of them have: batches of 16; shapes that change from step to step, so nothing is compiled or recorded;
    and no wish for the same bits twice, since on a GPU the gradients of resizing and RoIAlign have no order that is
    both fixed and fast."""
    config = Config(name, batch_size=16, min_lr=0.0, warmup_lr=1e-7, compile="off", cuda_graph=False)
    return replace(config, deterministic=False, size=512)


def mixa_coco(model: str = "") -> Config:
    """MixA's Faster R-CNN on COCO.

    Published: the trained classifier as the backbone, DeiT-T in an adapter; AdamW, lr 1e-4, weight decay 0.05,
    layer-wise decay 0.6, linear warm-up of 3,000 steps, drops after 27 and 33 of 36 epochs, batch 16, images of
    448×448, the best mAP. Inferred: drop path 0.1 (the adapter's), the warm-up's start and flips alone.
    """
    config = replace(base("mixa-coco"), lr=1e-4, weight_decay=0.05, layer_decay=0.6, size=448, drop_path=0.1)
    return replace(config, **THREE_TIMES, warmup_epochs=iterations(3000, COCO))


def mixa_ade(model: str = "") -> Config:
    """MixA's SemanticFPN on ADE20K.

    Published: DeiT-T in an adapter; AdamW, lr 2e-4, weight decay 1e-4, the power 0.9 of what is left, 40,000 steps of
    16 images of 448×448, evaluated every 4,000, the best mIoU. Inferred: that images are brought to a square, drop path
    0.1, scales 0.5 to 2, flips and changes of colour, which the base system has.
    """
    config = replace(base("mixa-ade"), lr=2e-4, weight_decay=1e-4, schedule="poly", poly_power=0.9, size=448)
    config = replace(config, epochs=iterations(40_000, ADE), eval_epochs=iterations(4000, ADE), warmup_epochs=0)
    return replace(config, drop_path=0.1, scale_jitter=(0.5, 2.0), photometric=True)


def qtvit_coco(model: str = "") -> Config:
    """QT-ViT's Cascade Mask R-CNN on COCO. Its recipe is not published: all of this is inferred from what the base
    system is usually trained by (Swin's): AdamW, lr 1e-4, weight decay 0.05, 500 steps of warm-up, drops after 27 and
    33 of 36 epochs, the shorter side 480 to 800 and the longer 1,333 at most, drop path 0.1."""
    config = replace(base("qtvit-coco"), lr=1e-4, weight_decay=0.05, drop_path=0.1, size=800, resize="shortest")
    config = replace(config, **THREE_TIMES, warmup_epochs=iterations(500, COCO))
    return replace(config, multiscale=tuple(range(480, 801, 32)))


def qtvit_ade(model: str = "") -> Config:
    """QT-ViT's UPerNet on ADE20K. Not published: inferred from the base system's usual recipe (Swin-T's): AdamW, lr
    6e-5, weight decay 0.01, 1,500 steps of warm-up, a linear fall over 160,000 steps of 16, the shorter side 512 times
    0.5 to 2 and crops of 512, drop path 0.3. mmsegmentation draws a crop again that one class fills; here it stays."""
    config = replace(base("qtvit-ade"), lr=6e-5, weight_decay=0.01, schedule="poly", poly_power=1.0, drop_path=0.3)
    config = replace(config, epochs=iterations(160_000, ADE), eval_epochs=iterations(16_000, ADE))
    config = replace(config, warmup_epochs=iterations(1500, ADE), warmup_lr=6e-11, resize="shortest")
    return replace(config, scale_jitter=(0.5, 2.0), photometric=True)


def castling_coco(model: str = "") -> Config:
    """Castling's PicoDet on COCO. Not published: inferred from PicoDet's first release: SGD, momentum 0.9, lr 0.4 for
    512 images (its 128 a GPU on 4), weight decay 4e-5, a cosine over 300 epochs after 300 steps of warm-up from a tenth
    of the rate (of 128 images, as here), EMA 0.9998, sizes of 256 to 384 around 320. PicoDet crops and expands images
    too; here they vary in scale from 0.5 to 1.5."""
    config = replace(base("castling-coco"), optimiser="sgd", lr=0.4, lr_batch=512, batch_size=128, weight_decay=4e-5)
    config = replace(config, epochs=300, warmup_epochs=iterations(300, COCO, 128), warmup_lr=0.01, ema=0.9998)
    config = replace(config, size=320, scale_jitter=(0.5, 1.5), photometric=True, eval_epochs=5)
    return replace(config, random_sizes=(256, 288, 320, 352, 384))


def castling_ade(model: str = "") -> Config:
    """Castling's Mask2Former on ADE20K. Not published: inferred from Mask2Former's own: AdamW, lr 1e-4, the trunk's a
    tenth of it, weight decay 0.05, gradients clipped at a norm of 0.01, the power 0.9 of what is left over 160,000
    steps of 16, the shorter side 512 times 0.5 to 2 and crops of 512."""
    config = replace(base("castling-ade"), lr=1e-4, trunk_lr=0.1, weight_decay=0.05, clip_norm=0.01, schedule="poly")
    config = replace(config, epochs=iterations(160_000, ADE), eval_epochs=iterations(5000, ADE), warmup_epochs=0)
    return replace(config, poly_power=0.9, resize="shortest", scale_jitter=(0.5, 2.0), photometric=True)


def finetune(model: str = "") -> Config:
    """A detector or segmenter on a pretrained trunk, short, for small sets. The values are this project's own."""
    config = replace(base("finetune"), lr=2e-4, epochs=24, warmup_epochs=0.5, min_lr=1e-6, trunk_lr=0.5, clip_norm=1.0)
    return replace(config, scale_jitter=(0.75, 1.5), photometric=True, eval_epochs=4)


def fast(model: str = "") -> Config:
    """Ours: a trained detector or segmenter with a converted trunk gets its accuracy back, most of it without labels.

    Every converted layer learns to do what its original did, the linear maps behind them are solved by least squares,
    and the maps that the head reads are aligned with the original's; so far no label is read, and the head stays as it
    is. Then a short fine-tune with labels; `--set stages.finetune.epochs=0` leaves it out. Images come to the model as
    they came to the original. The values are this project's own.
    """
    stages = (
        Stage("align", "alignment", 2, lr=5e-4, trainable="attention"),
        Stage("maps", "features", 22, lr=2e-4, trainable=r"^backbone\.", fit=32),
        Stage("finetune", "supervised", 6, lr=5e-5, features=0.1),
    )
    config = replace(base("fast"), lr=1e-4, warmup_epochs=0.5, min_lr=1e-6, clip_norm=1.0, stages=stages, epochs=30)
    return replace(config, size=None, scale_jitter=(0.75, 1.5), photometric=True, eval_epochs=10)


DENSE_RECIPES: dict[str, Callable[[str], Config]] = {
    "mixa-coco": mixa_coco,
    "mixa-ade": mixa_ade,
    "qtvit-coco": qtvit_coco,
    "qtvit-ade": qtvit_ade,
    "castling-coco": castling_coco,
    "castling-ade": castling_ade,
    "finetune": finetune,
    "fast": fast,
}
