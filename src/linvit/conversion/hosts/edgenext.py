"""EdgeNeXt's cross-covariance attention, where channels attend to channels: native is the mechanism `xca`.

It is XCiT's layer and hosted the same way: exact for `xca`, with the layer's own temperature; any other mechanism lets
tokens attend to tokens with the same projections, a new layer to be trained, for `drop=("temperature",)`. Any input
size.
"""

from __future__ import annotations

from timm.models.edgenext import CrossCovarianceAttn

from linvit.conversion.hosts.xcit import XCAHost


class EdgeNeXtHost(XCAHost, CrossCovarianceAttn):
    original = CrossCovarianceAttn  # type: ignore[assignment]
