"""Training: recipes, the engine, checkpoints, losses and distillation."""
