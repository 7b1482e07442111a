"""Pictures: plots of what was measured. Matplotlib is imported when one is drawn."""

from linvit.figures.edge import plot_edge
from linvit.figures.plots import plot_front, plot_masks, plot_op, plot_sensitivity
from linvit.figures.style import check_picture
from linvit.figures.theory import plot_theory

__all__ = ["check_picture", "plot_edge", "plot_front", "plot_masks", "plot_op", "plot_sensitivity", "plot_theory"]
