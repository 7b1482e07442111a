"""Hugging Face's vision models, by transformers' own attention interface: ViT, DeiT, DINOv2 (registers too), CLIP's and
SigLIP's vision towers, SAM's encoder, and the segmenter EoMT, on DINOv2 and on DINOv3.

Exact for softmax. The modules keep their own forward, with q, k and v handed to the mechanism where the interface lets
attention in; only SAM's does not use it. Its relative position is exact in mechanisms with logits and given up with
`drop=("relative_bias",)` elsewhere. The rotary position of EoMT on DINOv3 is honoured as in timm's EVA-02. In EoMT's
last blocks queries come before the other tokens and look through masks until training has annealed those away: a
mechanism without logits there wants `model.attn_mask_probs` to be 0. Needs `pip install linvit[transformers]`; nothing
imports this file without.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersAttention
from transformers.models.eomt.modeling_eomt import EomtAttention, EomtForUniversalSegmentation
from transformers.models.eomt_dinov3.modeling_eomt_dinov3 import (
    EomtDinov3Attention,
    EomtDinov3ForUniversalSegmentation,
)
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.vit.modeling_vit import ViTAttention

from linvit.attention import Rotary, TokenGrid
from linvit.conversion.grids import Grids, stem
from linvit.conversion.host import (
    BY_ORIGINAL,
    FEATURES,
    Ask,
    ChannelsLastHost,
    Host,
    SequenceHost,
    has_logits,
    refuse_causal,
    unpack,
)
from linvit.conversion.hosts.vit import split_mask
from linvit.errors import LinvitError, reason, unknown

INTERFACE = "linvit"
PREFIX = "transformers:"  # before a class's name, where a saved model's config has a timm name else


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention: the mechanism of the module. Weights are not returned, as by SDPA."""
    refuse_causal(bool(is_causal))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    mask, bias = split_mask(attention_mask, module.mechanism)
    module.passing.query = query
    seen = module.passing
    out = module.attend(query, key, value, module.token_grid, mask=mask, bias=bias, x=seen.input, rotary=seen.rotary)
    return out.transpose(1, 2), None


def padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """What transformers calls for the mask: which keys are no padding, `(batch, 1, 1, keys)`; none without padding."""
    return None if attention_mask is None else attention_mask[:, None, None, :].bool()


AttentionInterface.register(INTERFACE, attend)
AttentionMaskInterface.register(INTERFACE, padding_mask)


class Passing:
    """What the interface does not hand on: input and rotary position on the way in, the query on the way out."""

    input: Tensor | None = None
    rotary: Rotary | None = None
    query: Tensor | None = None


class InterfaceHost(SequenceHost):
    """A module that asks the interface for its attention.

    Each has a config of its own that says whom it asks: kept layers ask PyTorch's, and choosing another implementation
    for the model does not bring softmax back. The model's config, asked for masks only, says linvit too.
    """

    passing: Passing

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        rate = getattr(module, "attention_dropout", getattr(module, "dropout", 0.0))
        return [FEATURES["attention_dropout"]] if rate else []

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        if feature == "attention_dropout":
            module.attention_dropout = module.dropout = 0.0

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        found = {name: module for name, module in model.named_modules() if isinstance(module, InterfaceHost)}
        module: Any
        for module in list(model.modules()):
            if not isinstance(module, InterfaceHost) and host_in_transformers(module) is None:
                continue
            shared = module.config
            module.config = copy.copy(shared)
            module.config._attn_implementation = "sdpa"
            if isinstance(module, InterfaceHost):
                module.passing = Passing()
                module.config._attn_implementation = INTERFACE
            shared._attn_implementation = INTERFACE
        for name, owner in model.named_modules():
            if stem(owner) is None or type(owner).__module__.split(".")[0] != "transformers":
                continue
            around = name.rpartition(".")[0]
            inside = [host for place, host in found.items() if place.startswith(around)]
            if inside and all(host.grids is None for host in inside):
                grids = Grids()
                grids.follow(owner)
                for host in inside:
                    host.grids = grids

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.passing.input = hidden_states
        out, weights = super().forward(hidden_states, *args, **kwargs)
        query = self.passing.query
        self.passing.input = self.passing.rotary = self.passing.query = None
        assert query is not None
        return self.mechanism.after_projection(out, query), weights


class HFViTHost(InterfaceHost, ViTAttention):
    pass


class HFDeiTHost(InterfaceHost, DeiTAttention):
    pass


class HFDinov2Host(InterfaceHost, Dinov2Attention):
    pass


class HFDinov2RegistersHost(InterfaceHost, Dinov2WithRegistersAttention):
    pass


class HFSiglipHost(InterfaceHost, SiglipAttention):
    pass


class HFCLIPHost(InterfaceHost, CLIPAttention):
    pass


class _EomtBase(InterfaceHost):
    """Whatever comes before the patches is a prefix: class token, registers, and in the last blocks the queries."""

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return None if image.grid is None else replace(image.grid, prefix=args[0].shape[1] - image.grid.patches)

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        for owner in model.modules():
            whole = isinstance(owner, EomtForUniversalSegmentation | EomtDinov3ForUniversalSegmentation)
            if whole and refuse_masks not in owner._forward_pre_hooks.values():
                owner.register_forward_pre_hook(refuse_masks)

    @property
    def token_grid(self) -> TokenGrid | None:
        return None if self.grids is None else self.grid(self, (self.passing.input,), self.grids)

    def attend(self, *args: Any, bias: Tensor | None = None, **given: Any) -> Tensor:
        """In training a mask comes along even where it masks nothing, which is what `refuse_masks` makes sure of."""
        return super().attend(*args, bias=bias if has_logits(self.mechanism) else None, **given)


def refuse_masks(model: Any, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of EoMT: an error where queries would look through masks and a mechanism has no logits. A block
    hands its mask on to those behind it."""
    hosts = [layer.attention for layer in model.layers[-model.config.num_blocks :]]
    without = [block for block, host in enumerate(hosts) if isinstance(host, Host) and not has_logits(host.mechanism)]
    if without and bool(model.attn_mask_probs[: without[-1] + 1].any()):
        name = hosts[without[-1]].mechanism.name
        raise LinvitError(f"{name} cannot honour EoMT's masks: set model.attn_mask_probs to 0, as its annealing ends")


class HFEomtHost(_EomtBase, EomtAttention):
    pass


class HFEomtDinov3Host(_EomtBase, EomtDinov3Attention):
    features = {"rotary": ()}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return [FEATURES["rotary"], *super().asks(model, module)]

    def forward(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """The original's, with q and k left to the mechanism to rotate."""
        cos, sin = position_embeddings
        self.passing.rotary = Rotary(cos, sin)
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(hidden_states, *args, position_embeddings=still, **kwargs)


class _SamBase(ChannelsLastHost):
    features = {"relative_bias": ("rel_pos_h", "rel_pos_w")}
    num_attention_heads: int
    use_rel_pos: bool

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        return super().asks(model, module) + ([FEATURES["attention_dropout"]] if module.dropout else [])

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        if feature == "attention_dropout":
            module.dropout = 0.0

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> Any:
        size, heads = (hidden_states.shape[1], hidden_states.shape[2]), self.num_attention_heads
        tokens = hidden_states.flatten(1, 2)
        q, k, v = unpack(self.qkv(tokens), 3, heads)
        bias = None
        if self.use_rel_pos and self.rel_pos_h is not None and has_logits(self.mechanism):
            bias = self.get_decomposed_rel_pos(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.reshape(len(q), heads, tokens.shape[1], tokens.shape[1])
        out = self.attend(q, k, v, TokenGrid(*size), bias=bias, x=tokens)
        return self.project_out(out, q).unflatten(1, size), None


class HFSamHost(_SamBase, SamVisionAttention):
    pass


class HFSamSdpaHost(_SamBase, SamVisionSdpaAttention):
    pass


HOSTS = tuple(host for host in BY_ORIGINAL.values() if host.__module__ == __name__)


def host_in_transformers(module: nn.Module) -> type[Host] | None:
    """The host of a transformers module. Attention over text, in the same classes, has none."""
    host = BY_ORIGINAL.get(type(module))
    text = issubclass(host, InterfaceHost) and not hasattr(module.config, "patch_size") if host else False
    return None if text else host


def from_config(name: str, config: dict[str, Any]) -> nn.Module:
    """A model of transformers by the name of its class, from its config and without weights."""
    cls: Any = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise unknown("model of transformers", name, (n for n in dir(transformers) if n.endswith(("Model", "ation"))))
    kind: Any = cls.config_class
    try:
        return cls(kind.from_dict(harmless(config)))
    except Exception as error:  # whatever its config and constructor make of the values
        raise LinvitError(f"transformers' {name} cannot be built from its config: {reason(error)}") from error


def harmless(config: Any) -> Any:
    """The config without what names an implementation of attention: transformers may fetch and run it by its name."""
    if isinstance(config, dict):
        return {key: harmless(value) for key, value in config.items() if "implementation" not in str(key)}
    return copy.deepcopy(config)


def origin_of(model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """The name and the config that build this model."""
    return PREFIX + type(model).__name__, model.config.to_diff_dict()
