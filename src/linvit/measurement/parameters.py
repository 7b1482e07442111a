"""Counting parameters."""

from torch import nn

from linvit.attention import Mechanism


def count_parameters(model: nn.Module, *, mechanisms: bool = True) -> int:
    """Trainable parameters, shared ones once; frozen ones do not count.

    With `mechanisms` false, those that belong to a mechanism are left out as well: some papers count without them.
    """
    left_out: set[int] = set()
    if not mechanisms:
        left_out = {id(p) for m in model.modules() if isinstance(m, Mechanism) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in left_out)
