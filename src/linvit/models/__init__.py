"""What timm lacks, and the papers' named models. Importing this registers them all with timm."""

from linvit.models.backbones import Backbone, make_backbone
from linvit.models.dense import HEADS, DenseModel
from linvit.models.named import list_models
from linvit.models.pyramid import FairPyramid

__all__ = ["HEADS", "Backbone", "DenseModel", "FairPyramid", "list_models", "make_backbone"]
