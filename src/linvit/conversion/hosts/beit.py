"""BEiT's attention, with a table of relative positions in each layer or one that all layers share.

Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`, and
the shared table goes once no layer uses it. Any input size: on another grid the table is resized bicubically.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.beit import Attention, RelativePositionBias
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, dropout_ask, follow_grids, given
from linvit.conversion.relative import any_image_size, table_bias


class BeitHost(Host, Attention):
    original = Attention
    uses_shared = True
    k_bias: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.proj.in_features // module.num_heads, dim=module.qkv.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        own = [bias_ask("relative_bias")] if module.relative_position_bias_table is not None else []
        return own + dropout_ask(module)

    @classmethod
    def asks_in(cls, model: nn.Module, module: Any) -> list[Ask]:
        asks = cls.asks(module)
        shared = getattr(module, "uses_shared", True) and given(model, module, "rel_pos_bias")
        if shared and module.relative_position_bias_table is None:
            asks.append(bias_ask("relative_bias"))
        return asks

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.relative_position_bias_table = None
            module.relative_position_index = None
            module.uses_shared = False

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_grids(model, cls)
        any_image_size(model, cls)
        owner: Any
        for owner in model.modules():
            shared: Any = getattr(owner, "rel_pos_bias", None)
            if type(shared) not in (RelativePositionBias, SharedBias):
                continue
            inside = [m for m in owner.modules() if isinstance(m, Attention)]
            if not any(getattr(m, "uses_shared", True) for m in inside):
                owner.rel_pos_bias = None
                continue
            shared.__class__ = SharedBias
            shared.grids = next(m.grids for m in inside if isinstance(m, cls))

    def _bias(self, grid: TokenGrid | None, shared: Tensor | None) -> Tensor | None:
        if not self.mechanism.capabilities.bias:
            return None
        shared = shared if self.uses_shared else None
        if self.relative_position_bias_table is None:
            return shared
        if grid is None or (grid.height, grid.width) == tuple(self.window_size):
            own = self._get_rel_pos_bias()
        else:
            own = table_bias(self.relative_position_bias_table, self.window_size, grid)
        return own if shared is None else own + shared

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        grid = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, grid, bias=self._bias(grid, shared_rel_pos_bias), x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))


class SharedBias(RelativePositionBias):
    """The table all layers share, for the grid of the image now passing through."""

    grids: Grids | None = None

    def forward(self) -> Tensor:
        grid = self.grids.grid if self.grids is not None else None
        if grid is None or (grid.height, grid.width) == tuple(self.window_size):
            return super().forward()
        return table_bias(self.relative_position_bias_table, self.window_size, grid)
