"""Segmentation: drawing."""
