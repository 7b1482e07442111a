"""The attention of MetaFormer models: CAFormer and others with attention stages. Exact for softmax, any input size.

Stages that mix tokens by pooling or convolution have no attention and stay as they are.
"""

from __future__ import annotations

from timm.models.metaformer import Attention

from linvit.conversion.host import PlainHost


class MetaFormerHost(PlainHost, Attention):
    original = Attention
