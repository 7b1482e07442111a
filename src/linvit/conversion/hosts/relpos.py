"""`RelPosAttention` of timm's ViT-relpos and ViT-SRelPos: a table or a small MLP of relative positions, in each layer
or shared by all.

Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`, and
the shared one goes once no layer uses it. Any input size: a table is resized bicubically, the MLP is asked at the new
offsets, on the scale it was trained with.
"""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor

from linvit.conversion.host import has_logits
from linvit.conversion.relative import SharedBiasHost


class RelPosHost(SharedBiasHost, RelPosAttention):
    original = RelPosAttention
    features = {"relative_bias": ("rel_pos",)}
    shared = "shared_rel_pos"
    rel_pos: Any

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        if self.rel_pos is not None:
            return self.rel_pos.get_bias()
        return shared if self.uses_shared else None

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        out = self.attend(q, k, v, self.token_grid, bias=self._bias(shared_rel_pos), x=x)
        return self.proj_drop(self.project_out(out, q))
