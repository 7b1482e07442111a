"""Fused attention in Triton, and which tensors it serves. The lowest layer: it knows nothing of mechanisms."""
