"""Muon: matrices move along the orthogonal factor of their momentum, all directions equally far; the rest by AdamW.

The hope is that a converted model has to change along many directions of which few have large gradients. The rate is
matched to AdamW's (the root mean square of a move is that of AdamW's, 0.2 of the rate), so one rate serves both. torch
has a Muon too; this one differs in what our engine needs. Matrices of one shape are handled in one go, a packed qkv as
its three parts; nothing asks the host, so that a step can be recorded as a CUDA graph; and a step with `found_inf`
leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at zero, and close enough to one from there on
ITERATIONS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal factor of each wide matrix `(count, rows, columns)`, by Newton–Schulz iteration in their
    precision, which is bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def directions(matrices: list[Tensor]) -> list[Tensor]:
    """The orthogonal factors of stacks of matrices `(count, rows, columns)`. Stacks of one shape go together, and so do
    those of its transpose: a step of a small model is as long as it has kernels."""
    wide = [stack.mT if stack.shape[-2] > stack.shape[-1] else stack for stack in matrices]
    shapes: dict[torch.Size, list[int]] = {}
    for index, stack in enumerate(wide):
        shapes.setdefault(stack.shape[1:], []).append(index)
    found: dict[int, Tensor] = {}
    for together in shapes.values():
        factors = orthogonal(torch.cat([wide[index].bfloat16() for index in together]))
        found |= zip(together, factors.split([len(wide[index]) for index in together]), strict=True)
    return [
        found[index].mT.contiguous() if stack.shape[-2] > stack.shape[-1] else found[index]
        for index, stack in enumerate(matrices)
    ]


def matrices_in(name: str, matrix: Tensor) -> int:
    """How many matrices a parameter holds, one below the other."""
    rows, columns = matrix.shape
    return 3 if "qkv" in name and rows == 3 * columns else 1


class Muon(torch.optim.AdamW):
    """Groups with `parts`, a count for each of their parameters, are moved by Muon, the others by AdamW."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.95, **adamw: Any) -> None:
        self.momentum = momentum
        super().__init__(groups, **adamw)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's own asks every parameter for a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [group for group in every if "parts" not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = every
        for group in every:
            if "parts" in group:
                self.move(group)
        return loss

    def move(self, group: dict[str, Any]) -> None:
        """One step of the matrices in a group."""
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter, parts in zip(group["params"], group["parts"], strict=True):
            if parameter.grad is not None:
                shapes.setdefault((parts, *parameter.shape), []).append(parameter)
        if not shapes:
            return
        found = getattr(self, "found_inf", None)
        rate = group["lr"]
        if not isinstance(rate, Tensor):  # the same arithmetic, to the bit, as with a rate that lies on the device
            rate = torch.full((), rate, device=group["params"][0].device)
        bad = torch.zeros_like(rate, dtype=torch.bool) if found is None else found > 0
        befores, afters, aheads = [], [], []
        for (parts, rows, columns), parameters in shapes.items():
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            befores.append(torch.stack([self.momentum_of(p) for p in parameters]))
            afters.append(befores[-1].lerp(gradients, 1 - self.momentum))
            aheads.append(gradients.lerp_(afters[-1], self.momentum).view(-1, rows // parts, columns))
        moved: list[Tensor] = []
        changes: list[Tensor] = []
        momenta: list[Tensor] = []
        every = zip(shapes.items(), befores, afters, directions(aheads), strict=True)
        for ((parts, rows, columns), parameters), before, after, direction in every:
            size = 0.2 * max(rows // parts, columns) ** 0.5
            change = torch.where(bad, 0, direction).to(after.dtype) * (size * rate)
            moved += parameters
            changes += change.reshape(after.shape).unbind()
            momenta += torch.where(bad, before, after).unbind()
        if group["weight_decay"]:
            torch._foreach_mul_(moved, torch.where(bad, 1, 1 - group["weight_decay"] * rate))
        torch._foreach_sub_(moved, changes)
        torch._foreach_copy_([self.momentum_of(p) for p in moved], momenta)

    def momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        found: Tensor = state["momentum"]
        return found
