"""Small trunks of many families, with every parameter moved off its initial value, and images of odd sizes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linvit.models.backbones import Backbone, make_backbone

VIT: dict[str, Any] = {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 3}
STAGES: dict[str, Any] = {"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 1, 1)}
WINDOWS: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 24, "num_heads": (2, 2, 4, 4)}
FORMER: dict[str, Any] = {"img_size": 128, "depths": (1, 1, 3, 3), "embed_dims": (16, 16, 32, 48)}


@dataclass(frozen=True)
class Kind:
    """A trunk that is built in a moment. `multiple` is what it pads sides to, `only` the one size that it takes."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    multiple: int = 1
    only: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> tuple[int, int]:
        """Odd and not square, and larger than what most are built for."""
        return (97, 126) if self.only is None else (self.only[0] - 3, self.only[1] - 31)

    def build(self, pyramid: str = "auto", **pyramid_args: Any) -> Backbone:
        torch.manual_seed(0)
        return moved(make_backbone(self.name, pyramid, pyramid_args=pyramid_args or None, **self.args)).eval()


def moved(model: Backbone) -> Backbone:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def images(height: int, width: int, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


PYRAMIDS = [
    Kind("swin_tiny_patch4_window7_224", {**WINDOWS, "depths": (1, 2, 1, 2)}, multiple=4),
    Kind("mixa_swin_tiny_w14", {**WINDOWS, "depths": (1, 2, 1, 2)}, multiple=4),
    Kind("pvt_v2_b0", {**STAGES, "num_heads": (1, 2, 3, 4)}),
    Kind("twins_svt_small", {**STAGES, "num_heads": (1, 2, 3, 4), "wss": (3, 3, 3, 3)}, multiple=32),
    Kind("efficientvit_b1", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1)}),
    Kind("qtvit_1", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1)}),
    Kind("hiera_tiny_224", {"img_size": (128, 160), "embed_dim": 16, "stages": (1, 1, 1, 1)}, only=(128, 160)),
    Kind("sam2_hiera_tiny", {"embed_dim": 16, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)}, multiple=32),
    Kind("mvitv2_tiny", {"img_size": 64}),
    Kind("efficientformerv2_s0", FORMER, only=(128, 128)),
    Kind("mobile_efficientformerv2_s0", FORMER),
    Kind("maxvit_pico_rw_256", {"img_size": 64, "embed_dim": (32, 32, 32, 64), "depths": (1, 1, 1, 1)}, multiple=64),
    Kind("fair_pyramid_p4_sa", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}),
    Kind("fair_pyramid_p7_ea", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}),
    Kind("densenet121", {"growth_rate": 4, "block_config": (1, 1, 1, 1)}, multiple=32),
]
PLAIN = [
    Kind("deit_tiny_patch16_224", VIT, multiple=16),
    Kind("deit_tiny_distilled_patch16_224", VIT, multiple=16),
    Kind("vit_small_patch14_reg4_dinov2", {**VIT, "img_size": 56}, multiple=14),
    Kind("vit_small_patch8_224", {**VIT, "img_size": 32}, multiple=8),
    Kind("vit_small_patch32_224", VIT, multiple=32),
    Kind("eva02_tiny_patch14_224", {**VIT, "patch_size": 16}, multiple=16),
    Kind("vit_small_patch16_dinov3", VIT, multiple=16),
    Kind("mixa_deit_tiny_p14", {**VIT, "img_size": 56, "keep": 2}),
    Kind("beit_base_patch16_224", {**VIT, "img_size": (128, 160)}, only=(128, 160)),
    Kind(
        "samvit_base_patch16",
        {**VIT, "window_size": 3, "global_attn_indexes": (1, 3), "neck_chans": 16},
        multiple=16,
    ),
    Kind("xcit_nano_12_p16_224", {**VIT, "depth": 4}),
    Kind("fair_column_p14", {"embed_dim": 32, "depths": (2,), "num_heads": (2,)}),
]
KINDS = [*PYRAMIDS, *PLAIN]
