"""Counting parameters."""

from torch import nn


def count_parameters(model: nn.Module, *, without: type[nn.Module] | None = None) -> int:
    """Trainable parameters, shared ones once; frozen ones do not count.

    `without` leaves out the parameters of all modules of a kind: some papers count so.
    """
    left_out: set[int] = set()
    if without is not None:
        left_out = {id(p) for module in model.modules() if isinstance(module, without) for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in left_out)
