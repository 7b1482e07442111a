"""One job carried out: a model trained, or timed."""
