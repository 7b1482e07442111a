"""XCiT's `XCA`, where channels attend to channels: native is the mechanism `xca`, not softmax.

Exact for `xca`: q and k get unit length over the tokens and the layer's own temperature here, so that its weight stays
where it was; the mechanism is `xca` in its plain variant, and the √N undoes that variant's scale. Any other mechanism
lets tokens attend to tokens with the same projections, which is a new layer to be trained; there is no temperature in
it, so it asks for `drop=("temperature",)`. XCiT's class attention is CaiT's. Any input size.
"""

from __future__ import annotations

from typing import Any

from timm.models.xcit import XCA
from torch import Tensor
from torch.nn import functional as F

from linvit.conversion.host import PlainHost


class XCAHost(PlainHost, XCA):
    original = XCA
    native = "xca"
    features = {"temperature": ("temperature",)}

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"variant": "fair"} if mechanism == "xca" and module.temperature is not None else {}

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        if self.temperature is not None:
            q, k = F.normalize(q, dim=-2) * self.temperature * x.shape[1] ** 0.5, F.normalize(k, dim=-2)
        return q, k, v

    def no_weight_decay(self) -> set[str]:
        return set() if self.temperature is None else {"temperature"}
