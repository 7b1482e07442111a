"""Pictures: plots of what was measured. Matplotlib is imported when one is drawn."""

from linvit.figures.masks import plot_masks
from linvit.figures.sensitivity import plot_sensitivity
from linvit.figures.speed import plot_op
from linvit.figures.style import check_picture
from linvit.figures.theory import plot_theory

__all__ = ["check_picture", "plot_masks", "plot_op", "plot_sensitivity", "plot_theory"]
