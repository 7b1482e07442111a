"""Backbones without a classifier: their features, aligned with the original's and judged with and without labels."""
