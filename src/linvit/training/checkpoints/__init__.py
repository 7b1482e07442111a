"""Checkpoints: their files, and what of a run is in them."""
