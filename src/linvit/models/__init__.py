"""What timm lacks, and the papers' named models. Importing this registers them all with timm."""

from linvit.models.backbones import Backbone, make_backbone
from linvit.models.named import list_models
from linvit.models.pyramid import FairPyramid

__all__ = ["Backbone", "FairPyramid", "list_models", "make_backbone"]
