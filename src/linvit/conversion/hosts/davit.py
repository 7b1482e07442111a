"""DaViT's attention in windows. Exact for softmax, at any input size.

Windows that hang over the edge see zero padding as tokens, as in the original. The channel attention between them is
linear in the tokens already and stays as it is.
"""

from __future__ import annotations

from timm.models.davit import WindowAttention
from torch import Tensor

from linvit.conversion.host import WindowHost


class DaViTHost(WindowHost, WindowAttention):
    original = WindowAttention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.window, x=x), q)
