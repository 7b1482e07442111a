"""Segmentation: metrics and drawing."""
