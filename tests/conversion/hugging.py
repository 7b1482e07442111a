"""A tiny one of every family that Hugging Face's hosts serve, from its config, all parameters off their first value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIDE = 32
SMALL = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
RESIZE = {"interpolate_pos_encoding": True}


@dataclass(frozen=True)
class Case:
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)  # beside SMALL, or without it where `alone`
    prefix: int | None = None  # tokens before the patches, where hooks find the grid
    call: dict[str, Any] = field(default_factory=dict)  # for images of another size
    layers: int = 2
    side: int = SIDE
    other: tuple[int, int] | None = (64, 40)  # a second size, if any
    alone: bool = False
    inputs: Callable[[Tensor], dict[str, Any]] | None = None
    note: str = ""
    attentions: bool = True

    def __str__(self) -> str:
        return self.model + self.note

    def build(self, seed: int = 0, **more: Any) -> nn.Module:
        torch.manual_seed(seed)
        options = {**({} if self.alone else SMALL), **self.options, **more}
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**options))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.eval()

    def image(self, height: int | None = None, width: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, 3, height or self.side, width or height or self.side, generator=generator)

    def out(self, model: nn.Module, picture: Tensor | None = None, **call: Any) -> Tensor:
        return self.run(model, picture, **call).last_hidden_state

    def run(self, model: nn.Module, picture: Tensor | None = None, **call: Any) -> Any:
        picture = self.image() if picture is None else picture
        given = {"pixel_values": picture} if self.inputs is None else self.inputs(picture)
        other = self.call if picture.shape[-2:] != (self.side, self.side) else {}
        return model(**given, **other, **call)


def shuffled(picture: Tensor) -> dict[str, Any]:
    """MAE shuffles patches by noise."""
    patches = picture.shape[2] // 8 * (picture.shape[3] // 8)
    return {"pixel_values": picture, "noise": torch.rand(2, patches, generator=torch.Generator().manual_seed(2))}


def padded(picture: Tensor) -> dict[str, Any]:
    """Two pictures as SigLIP 2 takes them: patches, the second picture a row smaller, and padding behind."""
    rows, columns = picture.shape[2] // 8, picture.shape[3] // 8
    patches = torch.randn(2, rows * columns + 3, 192, generator=torch.Generator().manual_seed(3)).to(picture.dtype)
    sizes = torch.tensor([[rows, columns], [rows - 1, columns]])
    mask = (torch.arange(patches.shape[1]) < sizes.prod(1, keepdim=True)).long()
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": sizes}


WINDOWS = {
    "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3], "window_size": 4, "image_size": 32, "patch_size": 4,
}  # fmt: skip
REDUCED = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [12, 24], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
SAM = {"window_size": 3, "global_attn_indexes": [1], "output_channels": 8, "num_pos_feats": 4, "mlp_dim": 32}
SAM2 = {
    "hidden_size": 12, "embed_dim_per_stage": [12, 24, 48], "blocks_per_stage": [1, 2, 1], "image_size": [64, 64],
    "num_attention_heads_per_stage": [1, 2, 4], "window_size_per_stage": [4, 2, 2], "global_attention_blocks": [2],
    "num_query_pool_stages": 2, "window_positional_embedding_background_size": [4, 4],
}  # fmt: skip
HIERA = {
    "embed_dim": 12, "image_size": [64, 64], "depths": [1, 2, 1], "num_heads": [1, 2, 2], "num_query_pool": 2,
    "masked_unit_size": [4, 4], "masked_unit_attention": [True, True, False],
}  # fmt: skip
CASES = [
    Case("ViTModel", "ViTConfig", prefix=1, call=RESIZE),
    Case("DeiTModel", "DeiTConfig", prefix=2, call=RESIZE),
    Case("Dinov2Model", "Dinov2Config", prefix=1),
    Case("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 4}, prefix=5),
    Case("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 2}, prefix=3),
    Case("ViTMSNModel", "ViTMSNConfig", prefix=1, call=RESIZE),
    Case("IJepaModel", "IJepaConfig", prefix=0, call=RESIZE),
    Case("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}, prefix=1, call=RESIZE, inputs=shuffled),
    Case("BeitModel", "BeitConfig", {"use_relative_position_bias": True}, prefix=1, other=(64, 40)),
    Case("BeitModel", "BeitConfig", {"use_shared_relative_position_bias": True}, prefix=1, note="-shared"),
    Case("DPTModel", "DPTConfig", {"is_hybrid": False}, prefix=1),
    Case("SiglipVisionModel", "SiglipVisionConfig", prefix=0, call=RESIZE),
    Case("Siglip2VisionModel", "Siglip2VisionConfig", {"num_patches": 16}, inputs=padded),
    Case("CLIPVisionModel", "CLIPVisionConfig", prefix=1, call=RESIZE),
    Case("MetaClip2VisionModel", "MetaClip2VisionConfig", prefix=1, call=RESIZE),
    Case("AltCLIPVisionModel", "AltCLIPVisionConfig", prefix=1, call=RESIZE),
    Case("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", prefix=1, call=RESIZE),
    Case("CLIPSegVisionModel", "CLIPSegVisionConfig", prefix=1, call=RESIZE),
    Case("OwlViTVisionModel", "OwlViTVisionConfig", prefix=1, call=RESIZE),
    Case("Owlv2VisionModel", "Owlv2VisionConfig", prefix=1, call=RESIZE),
    Case("Blip2VisionModel", "Blip2VisionConfig", prefix=1, call=RESIZE),
    Case("Aimv2VisionModel", "Aimv2VisionConfig", prefix=0, other=None),
    Case("SwinModel", "SwinConfig", WINDOWS, alone=True, layers=3, other=(48, 40)),
    Case("Swinv2Model", "Swinv2Config", WINDOWS, alone=True, layers=3, other=(48, 40)),
    Case("SamVisionModel", "SamVisionConfig", SAM, other=None),
    Case("SamHQVisionModel", "SamHQVisionConfig", SAM, other=None),
    Case("Sam3ViTModel", "Sam3ViTConfig", {**SAM, "pretrain_image_size": 32}, other=None),
    Case("SegformerModel", "SegformerConfig", REDUCED, alone=True, side=64, other=(96, 72)),
    Case("PvtV2Model", "PvtV2Config", {**REDUCED, "image_size": 64}, alone=True, side=64, other=(96, 72)),
    Case(
        *("PvtV2Model", "PvtV2Config", {**REDUCED, "image_size": 64, "linear_attention": True}),
        alone=True, side=64, other=(96, 72), note="-linear",
    ),
    Case(
        *("Sam2HieraDetModel", "Sam2HieraDetConfig", SAM2),
        alone=True, side=64, layers=4, other=(96, 80), attentions=False,
    ),
    Case("HieraModel", "HieraConfig", HIERA, alone=True, side=64, layers=4, call=RESIZE, other=(96, 80)),
]  # fmt: skip
BY_NAME = {str(case): case for case in CASES}
every = pytest.mark.parametrize("case", CASES, ids=str)
