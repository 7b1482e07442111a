"""`RelPosAttention` of timm's ViT-relpos and ViT-SRelPos: a table or a small MLP of relative positions, in each layer
or shared by all.

Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`, and
the shared one goes once no layer uses it. Any input size: a table is resized bicubically, the MLP is asked at the new
offsets, on the scale it was trained with.
"""

from __future__ import annotations

from typing import Any

from timm.layers import RelPosBias, RelPosMlp
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from linvit.attention import Shape, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, bias_ask, dropout_ask, follow_grids, given
from linvit.conversion.relative import any_image_size, resized_bias


class RelPosHost(Host, RelPosAttention):
    original = RelPosAttention
    uses_shared = True
    rel_pos: Any

    @staticmethod
    def shape(module: Any) -> Shape:
        return Shape(module.num_heads, module.head_dim, dim=module.qkv.in_features)

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        own = [bias_ask("relative_bias")] if module.rel_pos is not None else []
        return own + dropout_ask(module)

    @classmethod
    def asks_in(cls, model: nn.Module, module: Any) -> list[Ask]:
        asks = cls.asks(module)
        shared = getattr(module, "uses_shared", True) and given(model, module, "shared_rel_pos")
        if shared and module.rel_pos is None:
            asks.append(bias_ask("relative_bias"))
        return asks

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "relative_bias":
            module.rel_pos = None
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
            if not hasattr(owner, "shared_rel_pos"):
                continue
            inside = [m for m in owner.modules() if isinstance(m, RelPosAttention)]
            if not any(getattr(m, "uses_shared", True) for m in inside):
                owner.shared_rel_pos = None
            grids = next(m.grids for m in inside if isinstance(m, cls))
            for module in list(owner.modules()):
                if type(module) in GRID_AWARE:
                    module.__class__ = GRID_AWARE[type(module)]
                    module.grids = grids

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if not self.mechanism.capabilities.bias:
            return None
        if self.rel_pos is not None:
            return self.rel_pos.get_bias()
        return shared if self.uses_shared else None

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        grid = self.grids.grid if self.grids is not None else None
        out = self.attend(q, k, v, grid, bias=self._bias(shared_rel_pos), x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))


class GridRelPosBias(RelPosBias):
    """The table, for the grid of the image now passing through."""

    grids: Grids | None = None

    def get_bias(self) -> Tensor:
        grid = self.grids.grid if self.grids is not None else None
        if grid is None or (grid.height, grid.width) == tuple(self.window_size):
            return super().get_bias()
        return resized_bias(self, grid)


class GridRelPosMlp(RelPosMlp):
    """The MLP, for the grid of the image now passing through."""

    grids: Grids | None = None

    def get_bias(self) -> Tensor:
        grid = self.grids.grid if self.grids is not None else None
        if grid is None or (grid.height, grid.width) == tuple(self.window_size):
            return super().get_bias()
        return resized_bias(self, grid)


GRID_AWARE: dict[type[nn.Module], type[Any]] = {RelPosBias: GridRelPosBias, RelPosMlp: GridRelPosMlp}
