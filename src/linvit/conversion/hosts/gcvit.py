"""GCViT's attention in windows, with queries of its own or with global ones that all windows share.

Exact for softmax. The relative bias is exact in mechanisms with logits and given up with `drop=("relative_bias",)`
elsewhere. Takes any size that its windows divide: the original needs the one it was built for, here global queries of
another size are resized to the window.
"""

from __future__ import annotations

from timm.models.gcvit import WindowAttentionGlobal
from torch import Tensor
from torch.nn import functional as F

from linvit.conversion.host import WindowHost, has_logits


class GCViTHost(WindowHost, WindowAttentionGlobal):
    original = WindowAttentionGlobal
    features = {"relative_bias": ("rel_pos",)}

    def _queries(self, q_global: Tensor, windows: int) -> Tensor:
        """The global queries `(batch, height, width, channels)` for every window, in the original's order."""
        if q_global.shape[1:3] != tuple(self.window_size):
            picture = F.interpolate(q_global.permute(0, 3, 1, 2), self.window_size, mode="bilinear")
            q_global = picture.permute(0, 2, 3, 1)
        return self.split_heads(q_global.flatten(1, 2).repeat(windows // len(q_global), 1, 1))

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        k, v = heads[-2], heads[-1]
        q = self._queries(q_global, len(x)) if self.use_global and q_global is not None else heads[0]
        bias = self.rel_pos.get_bias() if self.rel_pos is not None and has_logits(self.mechanism) else None
        out = self.attend(q, k, v, self.window, bias=bias, x=x)
        return self.proj_drop(self.project_out(out, q))
