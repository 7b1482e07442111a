"""Detectors: a neck and a head that finds boxes, and some of them masks, on any backbone."""
