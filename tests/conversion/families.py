"""A small model of every family of hosts, with every parameter moved off its initial value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from timm.models._efficientnet_blocks import MobileAttention
from timm.models.gcvit import GlobalContextVitStage
from timm.models.metaformer import MetaFormerStage
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.mvitv2 import MultiScaleVitStage
from timm.models.nest import NestLevel
from torch import nn

from linvit.conversion import Plan, as_plan

DROP = ("relative_bias", "shift_mask", "talking_heads", "rotary", "temperature")


def permitting(plan: str | Plan, **options: Any) -> Plan:
    """A plan that may give up everything here but pooling, where a mechanism cannot honour it."""
    chosen = as_plan(plan, **options)
    return replace(chosen, drop=(*chosen.drop, *DROP))


BUILT: dict[str, nn.Module] = {}


@dataclass(frozen=True)
class Family:
    """One architecture shrunk until a forward pass takes milliseconds. `native` is the mechanism it comes with."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    size: int = 64
    native: str = "softmax"
    width: int | None = None  # where it is not square
    fixed: bool = False  # the model outside its attention takes one image size only
    other: tuple[int, int] | None = None  # a second size, where windows must divide the picture
    traces: bool = True  # timm's own model compiles as one graph and exports
    trim: Callable[[Any], None] | None = None  # shrink what no option shrinks

    def __str__(self) -> str:
        return self.model

    def build(self) -> nn.Module:
        """A new one each time; the first is kept, since timm's large models take long to be initialised."""
        if self.model not in BUILT:
            BUILT[self.model] = self.first()
        return copy.deepcopy(BUILT[self.model])

    def first(self) -> nn.Module:
        torch.manual_seed(0)
        model = timm.create_model(self.model, num_classes=7, **self.options)
        if self.trim is not None:
            self.trim(model)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.eval()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        own = (self.size, self.width or self.size)
        return [own] if self.fixed else [own, self.other or (self.size * 2, self.size + 32)]

    def image(self, height: int | None = None, width: int | None = None, batch: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, 3, height or self.size, width or self.width or self.size, generator=generator)


VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "dynamic_img_size": True}
STATIC = {name: value for name, value in VIT.items() if name != "dynamic_img_size"}
OBLONG = {**STATIC, "img_size": (64, 96)}
PIT = {"img_size": 64, "base_dims": (16, 16, 16), "depth": (1, 1, 1), "heads": (1, 2, 4)}


def one_block_per_stage(model: Any) -> None:
    """VOLO's depths are no option."""
    for i, stage in enumerate(model.network):
        model.network[i] = stage[:1] if isinstance(stage, nn.Sequential) else stage
    model.post_network = model.post_network[:1]


def few_blocks(model: Any) -> None:
    """A first block and one with attention in each stage, where depths are no option."""
    for module in list(model.modules()):
        if isinstance(module, NestLevel):
            module.transformer_encoder = module.transformer_encoder[:1]
        elif isinstance(module, MetaFormerStage):
            module.blocks = module.blocks[:1]
        elif isinstance(module, GlobalContextVitStage):
            module.blocks = module.blocks[:2]
        elif isinstance(module, MultiScaleVitStage):
            module.blocks = module.blocks[:1]
        elif isinstance(module, MobileNetV3):
            module.blocks = nn.Sequential(*(nn.Sequential(stage[0], *attention(stage)[:1]) for stage in module.blocks))


def attention(stage: Any) -> list[nn.Module]:
    return [block for block in stage if isinstance(block, MobileAttention)]


WINDOWS = {
    "img_size": 64,
    "window_size": 4,
    "depths": (2, 2),
    "embed_dim": 24,
    "num_heads": (2, 4),
    "strict_img_size": False,
}
PYRAMID = {"embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)}
MAXVIT = {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64), "stem_width": 16}
COATNET = {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 64), "stem_width": 16}
CONVOLUTIONAL = {"width_list": (8, 16, 32, 32, 64), "depth_list": (0, 1, 1, 1, 1), "head_widths": (32, 32)}

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
    Family("mvitv2_tiny", {"img_size": 64}, trim=few_blocks),
    Family("mvitv2_small_cls", {"img_size": 64}, trim=few_blocks),
    Family("efficientformerv2_s0", {"img_size": 128, "depths": (1, 1, 3, 3), "embed_dims": (16, 16, 32, 48)}, size=128),
    Family("efficientvit_b1", {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1)}, native="relu_linear"),
    Family("deit3_small_patch16_224", VIT),
    Family("vit_base_patch16_xp_224", VIT),
    Family("vit_dpwee_patch16_reg1_gap_256", VIT),
    Family("pit_ti_224", PIT, fixed=True),
    Family("pit_ti_distilled_224", PIT, fixed=True),
    Family("csatv2", {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 2), "transformer_depths": (0, 0, 1, 1)}),
    Family("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    Family("eva02_tiny_patch14_224", {**VIT, "patch_size": 16}),
    Family("eva02_base_patch14_448", {**VIT, "patch_size": 16, "depth": 1}),
    Family("eva_giant_patch14_224", {**VIT, "patch_size": 16, "depth": 1, "mlp_ratio": 2}),
    Family("vit_base_patch16_sapiens2", {**STATIC, "num_heads": 4, "num_kv_heads": 2}),
    Family("beit3_base_patch16_224", {**VIT, "depth": 1}),
    Family("vit_small_patch16_dinov3", VIT),
    Family("vit_pe_core_tiny_patch16_384", VIT),
    Family("vit_small_patch16_rope_mixed_224", VIT),
    Family("deepseek_vit_412m", {**STATIC, "patch_size": 16}),
    Family("qwen3_vit_88m", STATIC),
    Family(
        "gemma4_vit_167m",
        {**STATIC, "head_dim": 16, "intermediate_size": 96, "position_embedding_size": 32},
        traces=False,  # asks its data whether there is padding
    ),
    Family("beit_base_patch16_224", STATIC),
    Family("beitv2_base_patch16_224", {**STATIC, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    Family("vit_relpos_small_patch16_224", STATIC),
    Family("vit_srelpos_small_patch16_224", STATIC),
    Family("vit_relpos_base_patch16_cls_224", STATIC),
    Family("vit_relpos_base_patch32_plus_rpn_256", {**STATIC, "patch_size": 16, "rel_pos_type": "bias"}),
    Family("samvit_base_patch16", {**STATIC, "window_size": 3, "global_attn_indexes": (1,), "neck_chans": 16}),
    Family(
        "hiera_tiny_224",
        {"img_size": (64, 96), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 1, 1)},
        width=96,
        fixed=True,
    ),
    Family("sam2_hiera_tiny", {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)}),
    Family("cait_xxs24_224", OBLONG, width=96, fixed=True),
    Family("xcit_nano_12_p16_224", STATIC, native="xca"),
    Family("volo_d1_224", {"img_size": 64}, fixed=True, trim=one_block_per_stage),
    Family(
        "tnt_s_patch16_224",
        {
            "img_size": (64, 96),
            "depth": 2,
            "embed_dim": 48,
            "num_heads_outer": 3,
            "inner_dim": 16,
            "num_heads_inner": 2,
        },
        width=96,
        fixed=True,
    ),
    Family(
        "convit_tiny",
        {"img_size": 64, "depth": 3, "embed_dim": 12, "num_heads": 4, "local_up_to_layer": 2},
        fixed=True,
    ),
    Family("swinv2_tiny_window8_256", WINDOWS),
    Family("swinv2_cr_tiny_224", WINDOWS),
    Family("twins_svt_small", {**PYRAMID, "depths": (2, 1, 1, 2), "wss": (3, 3, 3, 3)}),
    Family("twins_pcpvt_small", PYRAMID),
    Family("tiny_vit_5m_224", {**PYRAMID, "window_sizes": (3, 3, 4, 2)}),
    Family("maxvit_pico_rw_256", MAXVIT),
    Family("maxvit_tiny_tf_224", MAXVIT),
    Family("maxvit_tiny_pm_256", MAXVIT),
    Family("maxxvitv2_nano_rw_256", MAXVIT),
    Family("coatnet_pico_rw_224", COATNET),
    Family("coatnet_rmlp_nano_rw_224", COATNET),
    Family("coatnet_0_224", COATNET),
    Family("mobilevit_xxs"),
    Family("davit_tiny", {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2), "window_size": 3}),
    Family("gcvit_xxtiny", {"img_size": 64, "embed_dim": 16}, other=(128, 64), trim=few_blocks),
    Family(
        "coat_lite_tiny",
        {"img_size": 64, "embed_dims": (16, 32, 40, 48), "serial_depths": (1, 1, 1, 1)},
        native="efficient",
    ),
    Family(
        "coat_tiny",
        {"img_size": 64, "embed_dims": (16,) * 4, "serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
        native="efficient",
    ),
    Family(
        "crossvit_9_240",
        {
            "img_size": 64,
            "img_scale": (1.0, 1.0),
            "patch_size": (8, 16),
            "embed_dim": (16, 32),
            "depth": ((1, 1, 0),),
            "num_heads": (2, 2),
        },
    ),
    Family("caformer_s18", trim=few_blocks),
    Family("nest_tiny", {"img_size": 64}, fixed=True, trim=few_blocks),
    Family(
        "visformer_tiny",
        {"img_size": 64, "embed_dim": 48, "depth": (1, 1, 1), "num_heads": 3, "init_channels": 8},
        fixed=True,
    ),
    Family("efficientformer_l1", {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 16, 32)}, size=224),
    Family(
        "edgenext_xx_small",
        {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "heads": (4, 4, 4, 4)},
        native="xca",
    ),
    Family("fastvit_sa12", {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 64)}),
    Family("nextvit_small", {"depths": (1, 2, 5, 1)}),
    Family("mobilenetv4_hybrid_medium", trim=few_blocks),
    Family("lowformer_b0", CONVOLUTIONAL),
    Family("cpubone_nano", CONVOLUTIONAL),
    Family("shvit_s1", {"embed_dim": (16, 32, 48), "partial_dim": (8, 12, 16), "depth": (1, 1, 1)}),
    Family("iformer_t", {"dims": (8, 16, 32, 48), "depths": (1, 1, 4, 3), "attn_groups": (0, 0, 1, 1)}),
    Family("efficientvit_m0", {"img_size": 128, "embed_dim": (16, 32, 48), "depth": (1, 1, 1)}, size=128),
]
