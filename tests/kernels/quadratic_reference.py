"""ReLU-quadratic attention by its formula, and how far what its kernels give may be from it."""

import torch
from torch import Tensor

# Relative RMS of output and gradients; the interpreter cuts float32 to bfloat16 where the GPU rounds.
LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 6e-3}


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        scores = scores + bias.repeat(len(q) // len(bias), 1, 1, 1)
    weight = torch.relu(scores)
    if mask is None:
        return weight @ v / k.shape[2]
    keep = mask[:, None, None, :]
    return torch.where(keep, weight, 0) @ v / keep.sum(-1, keepdim=True)


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
