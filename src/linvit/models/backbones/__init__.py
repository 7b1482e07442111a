"""Backbones: any timm model as maps at strides 4, 8, 16 and 32."""

from linvit.models.backbones.backbone import Backbone, make_backbone

__all__ = ["Backbone", "make_backbone"]
