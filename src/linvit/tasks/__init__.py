"""Tasks: data, head, loss and metric of each thing a model is trained for."""

from linvit.tasks.public import Trained, evaluate, train

__all__ = ["Trained", "evaluate", "train"]
