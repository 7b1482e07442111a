"""Backbones: any timm model as maps at strides 4, 8, 16 and 32."""
