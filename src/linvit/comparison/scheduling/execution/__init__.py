"""One task carried out: a model trained, or timed."""
