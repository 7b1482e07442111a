"""Tasks: data, head, loss and metric of each thing a model is trained for."""

from linvit.tasks.classify.evaluation import evaluate
from linvit.tasks.classify.training import Trained, train

__all__ = ["Trained", "evaluate", "train"]
