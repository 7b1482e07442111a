"""A small model of every family of hosts, with every parameter moved off its initial value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import nn

DROP = ("relative_bias", "shift_mask", "talking_heads")


@dataclass(frozen=True)
class Family:
    """One architecture shrunk until a forward pass takes milliseconds. `native` is the mechanism it comes with."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    size: int = 64
    native: str = "softmax"

    def __str__(self) -> str:
        return self.model

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = timm.create_model(self.model, num_classes=7, **self.options)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.eval()

    def image(self, height: int | None = None, width: int | None = None, batch: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, 3, height or self.size, width or self.size, generator=generator)


VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "dynamic_img_size": True}
FAMILIES = [
    Family("deit_tiny_patch16_224", VIT),
    Family("deit_tiny_distilled_patch16_224", VIT),
    Family(
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 64,
            "window_size": 4,
            "depths": (2, 2),
            "embed_dim": 24,
            "num_heads": (2, 4),
            "strict_img_size": False,
        },
    ),
    Family("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)}),
    Family("pvt_v2_b2_li", {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)}, size=256),
    Family("levit_128s", {"img_size": 128, "embed_dim": (32, 48, 64), "depth": (1, 1, 1)}, size=128),
    Family("levit_conv_128s", {"img_size": 128, "embed_dim": (32, 48, 64), "depth": (1, 1, 1)}, size=128),
    Family("mvitv2_tiny", {"img_size": 64}),
    Family("mvitv2_small_cls", {"img_size": 64}),
    Family("efficientformerv2_s0", {"img_size": 128}, size=128),
    Family("efficientvit_b1", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1)}, native="relu_linear"),
]
