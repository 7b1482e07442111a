"""Fused attention in Triton, a folder for each op, and which tensors it serves.

`fused.py` is what all of them share, `operators.py` gives them to PyTorch's compilers, exporters and counters. The
lowest layer: it knows nothing of mechanisms.
"""
