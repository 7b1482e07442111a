"""Segmentation: how well pixels are given their class."""
