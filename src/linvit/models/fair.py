"""The Fair Comparison's eighteen rows as timm models.

`fair_pyramid_p4_sa` is the pyramid on patches of four pixels with softmax attention, and so on; `fair_column_p14` and
`fair_column_p16` are the columns, softmax too.
"""

from __future__ import annotations

from typing import Any

from timm.models import build_model_with_cfg
from torch import nn

from linvit.models.pyramid import FairPyramid
from linvit.models.registration import add_model, default_cfg

MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sa": ("softmax", {}),
    "la": ("linformer", {"variant": "fair"}),
    "ea": ("efficient", {}),
    "pa": ("performer", {"variant": "fair"}),
    "aa": ("fastformer", {"variant": "fair"}),
    "xca": ("xca", {"variant": "fair"}),
    "lpi": ("xca", {"variant": "fair", "lpi": True}),
}
WINDOWS = {4: 7, 7: 8}  # on patches of 7 pixels the last stage has 4×4 tokens, and the window shrinks to them
COLUMN: dict[str, Any] = {"embed_dim": 384, "depths": (12,), "num_heads": (12,)}


def add_fair(name: str, *, stages: int = 4, fixed_size: bool = False, **settings: Any) -> None:
    def build(name: str, **kwargs: Any) -> nn.Module:
        features = {"out_indices": tuple(range(stages)), "feature_cls": "getter"}
        return build_model_with_cfg(FairPyramid, name, False, feature_cfg=features, **{**settings, **kwargs})

    cfg = default_cfg(first_conv="patch_embed.proj", classifier="head.fc", fixed_input_size=fixed_size)
    add_model(__name__, name, build, cfg)


for patch, window in WINDOWS.items():
    for short, (mechanism, options) in {**MECHANISMS, "window": ("window", {"window": window})}.items():
        add_fair(
            f"fair_pyramid_p{patch}_{short}",
            fixed_size=short == "la",
            patch_size=patch,
            mechanism=mechanism,
            options=options,
        )
for patch in (14, 16):
    add_fair(f"fair_column_p{patch}", stages=1, patch_size=patch, **COLUMN)
