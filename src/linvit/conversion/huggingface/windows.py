"""Windows: Swin, Swin v2, the encoders of SAM and SAM 3."""

from dataclasses import replace
from math import isqrt, log
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention
from transformers.models.sam3.modeling_sam3 import Sam3ViTRoPEAttention
from transformers.models.sam_hq.modeling_sam_hq import SamHQVisionAttention, SamHQVisionSdpaAttention
from transformers.models.swin.modeling_swin import SwinAttention
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from linvit.attention import Rotary, Shape, TokenGrid
from linvit.conversion.grids import Grids
from linvit.conversion.host import CLOSED, ChannelsLastHost, Host, has_logits, merge_heads, unpack
from linvit.conversion.hosts.windows import ShiftedWindowHost
from linvit.conversion.huggingface.interface import MapHost, attentions_wanted

LONGEST = log(100)  # of the temperature


class _Windows(MapHost, ShiftedWindowHost):
    """Square windows with relative positions, shifted in every second layer."""

    @classmethod
    def shape(cls, module: Any) -> Shape:
        return replace(Host.shape.__func__(cls, module), grid=None)  # type: ignore[attr-defined]

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid:
        side = isqrt(args[0].shape[1])
        return TokenGrid(side, side)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


class HFSwinHost(_Windows, SwinAttention):
    """Hugging Face's Swin. Relative bias and shift mask are exact in mechanisms with logits; a linear one gives them up
    with `drop=("relative_bias", "shift_mask")`."""

    features = {"relative_bias": ("relative_position_bias",), "shift_mask": ()}

    def _position(self) -> Tensor | None:
        return None if self.relative_position_bias is None else self.relative_position_bias()

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        self.passing.wanted = attentions_wanted(kwargs.get("output_attentions"))
        x, grid = hidden_states, self.grid(self, (hidden_states,), Grids())
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        out = self.attend(q, k, v, grid, bias=self._bias(attention_mask), x=x)
        out = self.mechanism.after_projection(self.o_proj(merge_heads(out)), q)
        return self.answer(out)


class HFSwinv2Host(_Windows, Swinv2SelfAttention):
    """Hugging Face's Swin v2: unit vectors and a temperature, which q carries here. Relative bias and shift mask as in
    Swin, `drop=("relative_bias", "shift_mask")` elsewhere. The output projection lies outside."""

    features = {"relative_bias": ("continuous_position_bias_mlp",), "shift_mask": ()}
    needs = (CLOSED,)

    def _position(self) -> Tensor | None:
        if self.continuous_position_bias_mlp is None:
            return None
        table = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()[None]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: Any = False
    ) -> Any:
        self.passing.wanted = bool(output_attentions)
        x, grid = hidden_states, self.grid(self, (hidden_states,), Grids())
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        temperature = self.logit_scale.clamp(max=LONGEST).exp() * q.shape[-1] ** 0.5
        mask = None if attention_mask is None else 2 * attention_mask  # the original adds it twice
        out = self.attend(
            F.normalize(q, dim=-1) * temperature, F.normalize(k, dim=-1), v, grid, bias=self._bias(mask), x=x
        )
        out, found = self.answer(merge_heads(out))
        return (out,) if found is None else (out, found)


class _SamBase(MapHost, ChannelsLastHost):
    features = {"relative_bias": ("rel_pos_h", "rel_pos_w")}
    num_attention_heads: int
    use_rel_pos: bool

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        super().prepare(model)
        for module in model.modules():
            kept = type(module) in (SamVisionSdpaAttention, SamHQVisionSdpaAttention)
            if kept and with_weights not in module._forward_hooks.values():
                module.register_forward_hook(with_weights, with_kwargs=True, prepend=True)

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> Any:
        self.passing.wanted = attentions_wanted(output_attentions)
        size, heads = (hidden_states.shape[1], hidden_states.shape[2]), self.num_attention_heads
        tokens = hidden_states.flatten(1, 2)
        q, k, v = unpack(self.qkv(tokens), 3, heads)
        bias = None
        if self.use_rel_pos and self.rel_pos_h is not None and has_logits(self.mechanism):
            bias = self.get_decomposed_rel_pos(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.reshape(len(q), heads, tokens.shape[1], tokens.shape[1])
        out = self.attend(q, k, v, TokenGrid(*size), bias=bias, x=tokens)
        out, found = self.answer(self.project_out(out, q).unflatten(1, size))
        return out, found if found is None else found.flatten(0, 1)


def with_weights(module: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
    """Forward hook of layers that stay: where attentions are wanted, PyTorch's attention has none and the plain one is
    asked. It comes before the hook that records them."""
    plain: Any = type(module).__base__
    return plain.forward(module, *args, **named) if attentions_wanted() else out


class HFSamHost(_SamBase, SamVisionAttention):
    """The encoder of Hugging Face's SAM and SAM-HQ. Its relative position is exact in mechanisms with logits and given
    up with `drop=("relative_bias",)` elsewhere."""


class HFSamSdpaHost(_SamBase, SamVisionSdpaAttention):
    pass


class HFSamHQHost(_SamBase, SamHQVisionAttention):
    pass


class HFSamHQSdpaHost(_SamBase, SamHQVisionSdpaAttention):
    pass


class HFSam3Host(MapHost, ChannelsLastHost, Sam3ViTRoPEAttention):
    """The ViT of Hugging Face's SAM 3, over windows or the whole picture. Exact for softmax. Its rotary position is
    honoured as in timm's EVA-02: mechanisms in which it cannot stay relative need `drop=("rotary",)`."""

    features = {"rotary": ()}

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        self.passing.wanted = attentions_wanted(kwargs.get("output_attentions"))
        x, size = hidden_states.flatten(1, 2), (hidden_states.shape[1], hidden_states.shape[2])
        heads, (cos, sin) = self.num_attention_heads, position_embeddings
        q, k, v = (
            project(x).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attend(q, k, v, TokenGrid(*size), x=x, rotary=Rotary(cos, sin, cos.shape[-1] // 2))
        out = self.mechanism.after_projection(self.o_proj(merge_heads(out)), q)
        return self.answer(out.unflatten(1, size))
