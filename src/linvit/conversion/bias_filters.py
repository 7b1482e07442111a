"""What takes the place of a relative bias that is given up: a depthwise filter on v, fitted to what the bias did.

A bias on the logits moves weight between neighbours at fixed offsets, and so does a filter on the values:

    what the bias did = map(q, k, bias) · v − map(q, k) · v ≈ conv(v)

The filter is the mechanism's `local` branch, which else starts at zero. Its weights solve a least squares problem on
what the original layers see of a few pictures of noise, so no data is needed, and how much of the bias's work the
filter explains is told. A bias is a head's, and so the channels of a head have one filter at first. The fit is a start;
training goes on from it.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention import Call, Mechanism, TokenGrid, create_attention, lift, values_at_queries
from linvit.attention.local import GridConv, WithDynamic, WithLocal
from linvit.conversion.host import Host, has_logits

if TYPE_CHECKING:
    from linvit.conversion.convert import Step

BIAS = "relative_bias"
RIDGE = 1e-3  # of the mean square of the values
QUERIES = 256  # of a picture or window, of which a head's map is looked at
ENOUGH, MOST = 20, 8  # equations for each weight, and pictures to get so many


class Watched(nn.Module):
    """A mechanism with logits that sums up, call by call, the least squares problem of the filter."""

    def __init__(self, inner: Mechanism, kernel_size: int) -> None:
        super().__init__()
        self.inner, self.kernel_size = inner, kernel_size
        self.gram: Tensor | None = None  # (heads, taps, taps)
        self.moment: Tensor | None = None  # (heads, taps)
        self.square, self.equations = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | None = None, **given: Any) -> Tensor:
        if grid is not None and given.get("bias") is not None:
            self.collect(q, k, v, self.inner._check(q, k, v, grid, **given))
        return self.inner(q, k, v, grid, **given)

    def collect(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        q, k, call = self.inner.enter(q, k, call)
        q, k, v = lift(q), lift(k), lift(v)
        grid, bias = call.grid, call.bias
        assert bias is not None
        step = -(-grid.patches // QUERIES)
        places = torch.arange(0, grid.patches, step, device=q.device)
        rows = grid.prefix + places
        some = replace(call, bias=bias if bias.shape[2] == 1 else bias[:, :, rows])
        moved = self.inner.implied_map(q[:, :, rows], k, some)
        moved = (moved - self.inner.implied_map(q[:, :, rows], k, replace(some, bias=None))) @ v
        _, patches = grid.split(values_at_queries(call.keep(v), call))
        near = F.unfold(grid.to_map(patches), self.kernel_size, padding=self.kernel_size // 2)
        near = near.unflatten(1, (v.shape[1], v.shape[3], self.kernel_size**2))[..., places].double()
        wanted = moved.transpose(2, 3).double()
        gram = torch.einsum("bhctn,bhcsn->hts", near, near)  # images, heads, channels, taps, queries
        moment = torch.einsum("bhctn,bhcn->ht", near, wanted)
        self.gram = gram if self.gram is None else self.gram + gram
        self.moment = moment if self.moment is None else self.moment + moment
        self.square += float(wanted.square().sum())
        self.equations += wanted[:, 0].numel()

    @property
    def enough(self) -> bool:
        return self.equations >= ENOUGH * self.kernel_size**2

    def solve(self) -> tuple[Tensor, float]:
        """The filters `(heads, 1, size, size)`, and how much of what the bias did they explain."""
        assert self.gram is not None and self.moment is not None
        size = self.gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
        ridge = RIDGE * size * torch.eye(self.kernel_size**2, dtype=self.gram.dtype, device=self.gram.device)
        taps = torch.linalg.solve(self.gram + ridge, self.moment)
        left = self.square - float((2 * taps * self.moment).sum() - torch.einsum("ht,hts,hs->", taps, self.gram, taps))
        share = 1 - left / self.square if self.square else 1.0
        return taps.reshape(-1, 1, self.kernel_size, self.kernel_size), share


def branch_of(mechanism: Mechanism) -> GridConv | None:
    """The convolution of the option `local`, if there is one."""
    found = (m for m in mechanism.modules() if isinstance(m, WithLocal) and not isinstance(m, WithDynamic))
    return next((m.conv for m in found), None)


@torch.no_grad()
def fit_filters(model: nn.Module, steps: "Iterable[Step]", size: tuple[int, int] | None = None) -> dict[str, float]:
    """Let the local branches of these steps do what the relative biases did that they give up, which the model still
    has. Gives the share of it that each explains, by layer."""
    from linvit.conversion.convert import install, own_size
    from linvit.conversion.dry_run import channels_of, image_part

    wanted = {step.name: step for step in steps if BIAS in step.dropped and branch_of(step.mechanism) is not None}
    if not wanted:
        return {}
    twin = copy.deepcopy(model).eval()
    watched: dict[str, Watched] = {}
    before = []
    for name, step in wanted.items():
        module, branch = twin.get_submodule(name), branch_of(step.mechanism)
        assert branch is not None
        inner = module.mechanism if isinstance(module, Host) and has_logits(module.mechanism) else None
        watched[name] = Watched(inner or create_attention("softmax"), branch.kernel_size)  # type: ignore[arg-type]
        others = tuple(feature for feature in step.dropped if feature != BIAS)
        before.append(replace(step, module=module, mechanism=watched[name], dropped=others))  # type: ignore[arg-type]
    install(twin, before)
    part: Any = image_part(twin)
    like = next(part.parameters())
    shape, generator = (1, channels_of(part), *(size or own_size(model))), torch.Generator().manual_seed(0)
    for _ in range(MOST):
        part(torch.randn(shape, generator=generator).to(like))
        if all(seen.enough for seen in watched.values()):
            break
    shares = {}
    for name, seen in watched.items():
        branch = branch_of(wanted[name].mechanism)
        if seen.gram is not None and branch is not None:
            filters, shares[name] = seen.solve()
            branch.conv.weight.copy_(filters.repeat_interleave(len(branch.conv.weight) // len(filters), dim=0))
    return shares
