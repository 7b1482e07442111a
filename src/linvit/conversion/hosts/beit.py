"""BEiT's attention, with a table of relative positions in each layer or one that all layers share.

Exact for softmax. The bias is exact in mechanisms with logits; others give it up with `drop=("relative_bias",)`, and
the shared table goes once no layer uses it. Any input size: on another grid the table is resized bicubically.
"""

from __future__ import annotations

from timm.models.beit import Attention
from torch import Tensor

from linvit.conversion.host import biased_projection, has_logits, unpack
from linvit.conversion.relative import SharedBiasHost, on_grid, table_bias


class BeitHost(SharedBiasHost, Attention):
    original = Attention
    features = {"relative_bias": ("relative_position_bias_table", "relative_position_index")}
    shared = "rel_pos_bias"

    def _bias(self, shared: Tensor | None) -> Tensor | None:
        if not has_logits(self.mechanism):
            return None
        shared, grid = shared if self.uses_shared else None, self.token_grid
        if self.relative_position_bias_table is None:
            return shared
        if grid is None or on_grid(self, grid):
            own = self._get_rel_pos_bias()
        else:
            own = table_bias(self.relative_position_bias_table, self.window_size, grid)
        return own if shared is None else own + shared

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = unpack(biased_projection(self, x), 3, self.num_heads)
        out = self.attend(q, k, v, self.token_grid, bias=self._bias(shared_rel_pos_bias), x=x)
        return self.proj_drop(self.project_out(out, q))
