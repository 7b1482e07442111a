"""XCiT's `XCA`, where channels attend to channels: native is the mechanism `xca`, not softmax.

Exact for `xca`: q and k get unit length over the tokens and the layer's own temperature here, so that its weight stays
where it was; the mechanism is `xca` in its plain variant, and the √N undoes that variant's scale. Any other mechanism
lets tokens attend to tokens with the same projections, which is a new layer to be trained; there is no temperature in
it, so it asks for `drop=("temperature",)`. XCiT's class attention is CaiT's. Any input size.
"""

from __future__ import annotations

from typing import Any

from timm.models.xcit import XCA
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Mechanism, TokenGrid
from linvit.conversion.host import Ask, Grids, Host, dropout_ask, follow_grids


def channel_attention(mechanism: Mechanism) -> bool:
    return mechanism.name == "xca" and mechanism.variant == "fair"


class XCAHost(Host, XCA):
    original = XCA
    native = "xca"

    @staticmethod
    def asks(module: Any) -> list[Ask]:
        return ([Ask("temperature", channel_attention)] if module.temperature is not None else []) + dropout_ask(module)

    @staticmethod
    def defaults(module: Any, mechanism: str) -> dict[str, Any]:
        return {"variant": "fair"} if mechanism == "xca" and module.temperature is not None else {}

    @staticmethod
    def give_up(module: Any, feature: str) -> None:
        if feature == "temperature":
            module.temperature = None

    @staticmethod
    def grid(module: Any, args: tuple[Any, ...], image: Grids) -> TokenGrid | None:
        return image.grid

    @classmethod
    def prepare(cls, model: nn.Module, hosts: list[tuple[str, nn.Module]]) -> None:
        follow_grids(model, cls)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.temperature is not None:
            q, k = F.normalize(q, dim=-2) * self.temperature * tokens**0.5, F.normalize(k, dim=-2)
        out = self.attend(q, k, v, self.grids.grid if self.grids is not None else None, x=x)
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(self.mechanism.after_projection(out, q))

    def no_weight_decay(self) -> set[str]:
        return set() if self.temperature is None else {"temperature"}
