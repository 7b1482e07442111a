"""Tasks: data, head, loss and metric of each thing a model is trained for."""
