"""Segmenters: a neck and a head that gives every pixel a class, on any backbone."""
