"""Optimisers and learning rates."""
