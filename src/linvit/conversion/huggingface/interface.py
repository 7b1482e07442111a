"""Hosts that keep their own forward: transformers' attention interface hands q, k and v to the mechanism.

Whoever asks a model for its attentions gets the maps that its mechanisms imply, layer by layer; one without a map is an
error, and so nothing is missing from the tuple.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from linvit.attention import Rotary
from linvit.conversion.grids import Grids, stem
from linvit.conversion.host import (
    ANOTHER_WIDTH,
    BY_ORIGINAL,
    FEATURES,
    Ask,
    Host,
    SequenceHost,
    changes_width,
    refuse_causal,
)
from linvit.conversion.hosts.vit import split_mask

INTERFACE, KEPT = "linvit", "linvit_kept"
DROPOUTS = ("attention_dropout", "dropout", "dropout_prob")  # what modules call the rate or the module
BEHIND = ("o_proj", "out_proj", "projection_layer", "projection")  # and the projection of the output


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for attention: the mechanism of the module, and its map where attentions are wanted."""
    refuse_causal(bool(is_causal))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    mask, bias = split_mask(attention_mask, module.mechanism)
    module.passing.query = query
    seen = module.passing
    out = module.attend(query, key, value, module.token_grid, mask=mask, bias=bias, x=seen.input, rotary=seen.rotary)
    return out.transpose(1, 2), seen.map


def kept(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What layers that keep softmax call: PyTorch's, and the weights where attentions are wanted."""
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if not attentions_wanted(kwargs.get("output_attentions")):
        return out, None
    logits = query @ key.transpose(-2, -1) * (kwargs.get("scaling") or query.shape[-1] ** -0.5)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        logits = logits + attention_mask
    return out, logits.softmax(-1)


def padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """What transformers calls for the mask: which keys are no padding, `(batch, 1, 1, keys)`; none without padding."""
    return None if attention_mask is None else attention_mask[:, None, None, :].bool()


AttentionInterface.register(INTERFACE, attend)
AttentionInterface.register(KEPT, kept)
AttentionMaskInterface.register(INTERFACE, padding_mask)


def attentions_wanted(asked: Any = None) -> bool:
    """Whether the caller of the model asked for its attentions: of this module, or of transformers' recorder."""
    recorder: Any = _active_collector
    held = recorder.global_var if torch.compiler.is_compiling() else recorder.get()
    return bool(asked) or (held is not None and "attentions" in held)


class Passing:
    """What passes a host beside its arguments: input and rotary position on the way in, the query on the way out, and
    the map where it is wanted."""

    input: Tensor | None = None
    rotary: Rotary | None = None
    query: Tensor | None = None
    wanted = False
    map: Tensor | None = None


class MapHost(Host):
    """A host whose caller may want the map beside the output."""

    passing: Passing

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        prepare(model)

    @classmethod
    def asks(cls, model: nn.Module, module: Any) -> list[Ask]:
        given_up = "attention_dropout" in getattr(module, "given_up", ())
        dropout = [FEATURES["attention_dropout"]] if dropout_rate(module) and not given_up else []
        wide = any(changes_width(getattr(module, name, None)) for name in BEHIND)
        return [*super().asks(model, module), *dropout, *([ANOTHER_WIDTH] if wide else [])]

    @classmethod
    def give_up(cls, module: Any, feature: str) -> None:
        super().give_up(module, feature)
        for name in DROPOUTS if feature == "attention_dropout" else ():
            held = getattr(module, name, None)
            if isinstance(held, nn.Dropout):
                held.p = 0.0
            elif held is not None:
                setattr(module, name, 0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Any, **given: Any) -> Tensor:
        out = super().attend(q, k, v, grid, **given)
        self.passing.map = self.map_of(q, k, grid, **given) if self.passing.wanted else None
        return out

    def map_of(self, q: Tensor, k: Tensor, grid: Any, rotary: Any = None, x: Any = None, **given: Any) -> Tensor:
        if rotary is not None and not self.mechanism.capabilities.rotary:
            q, k, rotary = rotary(q), rotary(k), None
        if grid is not None and grid.tokens != q.shape[2]:
            grid = None
        return self.mechanism.map(q, k, grid, rotary=rotary, **given)

    def answer(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output with the map where it is wanted, as modules of transformers return them."""
        found, self.passing.map = self.passing.map, None
        return out, found


def prepare(model: nn.Module) -> None:
    """Say whom each attention module asks, hosts and layers that are kept."""
    module: Any
    for module in list(model.modules()):
        host = vision_host(module)
        if host is None or not issubclass(host, MapHost):
            continue
        if isinstance(module, MapHost):
            module.passing = Passing()
        if not hasattr(module, "config"):
            continue
        shared = module.config
        module.config = copy.copy(shared)
        module.config._attn_implementation = INTERFACE if isinstance(module, MapHost) else KEPT
        if issubclass(host, InterfaceHost):
            shared._attn_implementation = INTERFACE


def dropout_rate(module: Any) -> float:
    held = (getattr(module, name, None) for name in DROPOUTS)
    return next((float(getattr(rate, "p", rate)) for rate in held if rate is not None), 0.0)


class InterfaceHost(MapHost, SequenceHost):
    """A module that asks the interface for its attention.

    Each has a config of its own that says whom it asks: kept layers ask PyTorch's, and choosing another implementation
    for the model does not bring softmax back. The model's config, asked for masks only, says linvit too.
    """

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        prepare(model)
        follow_embeddings(model)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.passing.input = hidden_states
        self.passing.wanted = attentions_wanted(kwargs.get("output_attentions"))
        out, weights = super().forward(hidden_states, *args, **kwargs)
        query = self.passing.query
        self.passing.input = self.passing.rotary = self.passing.query = self.passing.map = None
        assert query is not None
        return self.mechanism.after_projection(out, query), weights


def follow_embeddings(model: nn.Module) -> None:
    """Give hosts the grid that the patch embedding beside them makes of a picture; those of a decoder, which has none
    of its own, that of the model's only one."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, SequenceHost)}
    made = []
    for name, owner in model.named_modules():
        if stem(owner) is None or type(owner).__module__.split(".")[0] != "transformers":
            continue
        around = name.rpartition(".")[0]
        inside = [host for place, host in found.items() if place.startswith(around)]
        if inside and all(host.grids is None for host in inside):
            made.append(Grids())
            made[-1].follow(owner)
            for host in inside:
                host.grids = made[-1]
    if len(made) == 1:
        for host in found.values():
            host.grids = host.grids or made[0]


def vision_host(module: nn.Module) -> type[Host] | None:
    """The host of a transformers module, converted or not. Attention over text, in the same classes, has none."""
    if isinstance(module, Host):
        return type(module)
    host = BY_ORIGINAL.get(type(module))
    if host is None or not hasattr(module, "config"):
        return host
    seen = any(hasattr(module.config, name) for name in ("patch_size", "patch_sizes", "patch_kernel_size"))
    return host if seen else None
