"""Sequences of patches: ViT and its kin, with rotary position, with a relative bias, shuffled, padded, with queries."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.aimv2.modeling_aimv2 import Aimv2Attention
from transformers.models.altclip.modeling_altclip import AltCLIPAttention
from transformers.models.beit.modeling_beit import BeitAttention
from transformers.models.blip_2.modeling_blip_2 import Blip2Attention
from transformers.models.chinese_clip.modeling_chinese_clip import ChineseCLIPVisionAttention
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.clipseg.modeling_clipseg import CLIPSegAttention
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersAttention
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTAttention
from transformers.models.dpt.modeling_dpt import DPTSelfAttention
from transformers.models.eomt.modeling_eomt import EomtAttention, EomtForUniversalSegmentation
from transformers.models.eomt_dinov3.modeling_eomt_dinov3 import (
    EomtDinov3Attention,
    EomtDinov3ForUniversalSegmentation,
)
from transformers.models.ijepa.modeling_ijepa import IJepaAttention
from transformers.models.metaclip_2.modeling_metaclip_2 import MetaClip2Attention
from transformers.models.owlv2.modeling_owlv2 import Owlv2Attention
from transformers.models.owlvit.modeling_owlvit import OwlViTAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.siglip2.modeling_siglip2 import Siglip2Attention
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEAttention, ViTMAEModel
from transformers.models.vit_msn.modeling_vit_msn import ViTMSNAttention

from linvit.attention import Rotary, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import CLOSED, Ask, Host, given, has_logits
from linvit.conversion.huggingface.interface import InterfaceHost
from linvit.errors import LinvitError


class HFViTHost(InterfaceHost, ViTAttention):
    """Hugging Face's ViT and its kin, by transformers' own attention interface: DeiT, DINOv2 (registers too, and inside
    Depth Anything), ViTMSN, I-JEPA, the vision towers of CLIP, MetaCLIP 2, AltCLIP, Chinese-CLIP, CLIPSeg, SigLIP,
    OWL-ViT, OWLv2 and BLIP-2, AIMv2.

    Exact for softmax. The modules keep their own forward, with q, k and v handed to the mechanism where the interface
    lets attention in. Attention over text, in the same classes, stays.
    """


PLAIN = (
    *(DeiTAttention, Dinov2Attention, Dinov2WithRegistersAttention, ViTMSNAttention, IJepaAttention, CLIPAttention),
    *(MetaClip2Attention, AltCLIPAttention, ChineseCLIPVisionAttention, CLIPSegAttention, SiglipAttention),
    *(OwlViTAttention, Owlv2Attention, Blip2Attention, Aimv2Attention),
)
for original in PLAIN:
    name = f"HF{original.__name__.removesuffix('Attention')}Host"
    globals()[name] = type(name, (InterfaceHost, original), {"__module__": __name__})


class _Rotary(InterfaceHost):
    features = {"rotary": ()}

    def forward(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """The original's, with q and k left to the mechanism to rotate."""
        cos, sin = position_embeddings
        self.passing.rotary = Rotary(cos, sin)
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(hidden_states, *args, position_embeddings=still, **kwargs)


class HFDINOv3Host(_Rotary, DINOv3ViTAttention):
    """Hugging Face's DINOv3. Exact for softmax. Its rotary position is honoured as in timm's EVA-02: mechanisms in
    which it cannot stay relative need `drop=("rotary",)`."""


class HFDPTHost(InterfaceHost, DPTSelfAttention):
    """The ViT of Hugging Face's DPT. Exact for softmax. Its output projection lies outside, and so what a mechanism
    adds behind that (Fastformer's query) has no place."""

    needs = (CLOSED,)


class HFBeitHost(InterfaceHost, BeitAttention):
    """Hugging Face's BEiT. The relative bias, a layer's own or shared, is exact in mechanisms with logits and given up
    with `drop=("relative_bias",)` elsewhere; the tables go with it where no layer needs them any more."""

    features = {"relative_bias": ()}

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        biased = given(model, module, "relative_position_bias")
        return [ask for ask in super().asks(model, module) if biased or ask.feature != "relative_bias"]

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        owner: Any
        for owner in model.modules():
            inside = [module for module in owner.modules() if isinstance(module, BeitAttention)]
            gone = all("relative_bias" in getattr(module, "given_up", ()) for module in inside)
            if inside and gone and isinstance(getattr(owner, "relative_position_bias", None), nn.Module):
                owner.relative_position_bias = None

    def attend(self, *args: Any, bias: Tensor | None = None, **given: Any) -> Tensor:
        honoured = has_logits(self.mechanism) and "relative_bias" not in self.given_up
        return super().attend(*args, bias=bias if honoured else None, **given)


class Places:
    """Where MAE's embedding, which shuffles patches, has put each of them: `(batch, patches)`."""

    def __init__(self) -> None:
        self.order: Tensor | None = None

    def after_embeddings(self, embeddings: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        self.order = out[2]


class HFViTMAEHost(InterfaceHost, ViTMAEAttention):
    """Hugging Face's ViTMAE, encoder and decoder. Exact for softmax. The encoder sees patches shuffled: mechanisms that
    look at the grid or at neighbours get them row by row where none is masked (`mask_ratio=0`), and else no grid."""

    places: Places | None = None

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        for owner in model.modules():
            if isinstance(owner, ViTMAEModel):
                inside = [module for module in owner.modules() if isinstance(module, cls)]
                places = next((module.places for module in inside if module.places is not None), None)
                if inside and places is None:
                    places = Places()
                    owner.embeddings.register_forward_hook(places.after_embeddings)
                for module in inside:
                    module.places = places

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Any, x: Any = None, **given: Any) -> Tensor:
        order = self.places.order if self.places is not None else None
        if order is None or grid is None or grid.tokens != q.shape[2] or self.mechanism.capabilities.equivariant:
            return super().attend(q, k, v, grid, x=x, **given)
        order = torch.cat((torch.zeros_like(order[:, :1]), order + 1), dim=1)
        rows, back = order[:, None, :, None], order.argsort(1)[:, None, :, None]
        q, k, v = (t.gather(2, rows.expand_as(t)) for t in (q, k, v))
        x = None if x is None else x.gather(1, order[:, :, None].expand_as(x))
        out = super().attend(q, k, v, grid, x=x, **given)
        if (found := self.passing.map) is not None:
            found = found.gather(2, back.expand_as(found))
            self.passing.map = found.gather(3, back.transpose(2, 3).expand_as(found))
        return out.gather(2, back.expand_as(out))


class HFSiglip2Host(InterfaceHost, Siglip2Attention):
    """The vision tower of Hugging Face's SigLIP 2 for pictures of any shape (NaFlex). Exact for softmax. The padding
    mask is honoured by every mechanism with a key mask; padded batches have no one grid, so mechanisms that look at it
    need pictures of one size there. Checkpoints of one size (`…-patch16-224`) are SigLIP's classes."""


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
    """The segmenter EoMT of Hugging Face, on DINOv2 and on DINOv3. Exact for softmax. The rotary position of the latter
    is honoured as in timm's EVA-02. In the last blocks queries come before the other tokens and look through masks
    until training has annealed those away: a mechanism without logits there wants `model.attn_mask_probs` to be 0."""


class HFEomtDinov3Host(_EomtBase, _Rotary, EomtDinov3Attention):
    pass
