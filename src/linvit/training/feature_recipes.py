"""The recipe of backbones that learn their original's features, without labels."""

from collections.abc import Callable
from dataclasses import replace

from linvit.training.config import Config, Stage


def fast(model: str = "") -> Config:
    """Ours: a converted backbone gives its original's features again, without labels, in three stages.

    Every converted layer learns to do what its original did, the linear maps behind them are solved by least squares
    and the outputs of whole blocks aligned: both short, for alone they can hurt. Most of the time goes into the final
    features, those of the patches and of the image, with a small weight on the blocks and all weights learning.
    `--set stages.align.epochs=0 --set stages.blocks.epochs=0 --set stages.final.features=0` leaves only these. Small
    batches and Muon as for classifiers, at a lower rate, which real weights take better; images are cropped and
    flipped, and not mixed. The values are this project's own choice.
    """
    stages = (
        Stage("align", "alignment", 1, trainable="attention"),
        Stage("blocks", "features", 1, fit=256),
        Stage("final", "final", 18, features=0.1),
    )
    config = Config(
        "fast", lr=1e-4, optimiser="muon", muon_lr=6.0, batch_size=64, warmup_epochs=0.5, min_lr=1e-6, clip_norm=1.0
    )
    return replace(config, crop_scale=(0.35, 1.0), epochs=20, eval_epochs=5, stages=stages)


FEATURE_RECIPES: dict[str, Callable[[str], Config]] = {"fast": fast}
