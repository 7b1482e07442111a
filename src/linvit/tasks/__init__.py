"""Tasks: data, head, loss and metric of each thing a model is trained for."""

from linvit.tasks.predicting import Classified, Detected, Prediction, Segmented, predict
from linvit.tasks.public import Trained, evaluate, train

__all__ = ["Classified", "Detected", "Prediction", "Segmented", "Trained", "evaluate", "predict", "train"]
