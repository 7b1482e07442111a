"""What timm lacks, and the papers' named models. Importing this registers them all with timm."""

from linvit.models import derived, fair  # noqa: F401  importing a file registers what it holds
from linvit.models.pyramid import FairPyramid
from linvit.models.registration import list_models

__all__ = ["FairPyramid", "list_models"]
