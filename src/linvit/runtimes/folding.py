"""The same function in fewer steps: what is rewritten in a model's copy before it is traced. Each rewriting is exact
but for rounding, which verification against the model itself sees to.

- One packed projection becomes three, so that no runtime has to cut and move what it has just written.
- A constant that only scales goes into the weights that make the values: the 1/(N·√d) of SteLLA and, as a ReLU lets
  it through, of ReLU-quadratic attention.
- Where the attention is linear all the way, the output projection W joins the state, which is small:
  phi(q) · (phi(k)ᵀ · v) · W = phi(q) · ((phi(k)ᵀ · v) · W), with a product less over the tokens. A row sum divides
  the queries. With more tokens than channels the weights V of the values join it too, for one product less again:
  phi(k)ᵀ · (x · V) = (phi(k)ᵀ · x) · V.
- ReLU-quadratic attention takes some queries at a time, so that their part of the map stays in the cache.
- BatchNorm goes into the convolution before it.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from linvit.attention import Constant, EluPlusOne, LinearAttention, Mechanism, ReLU, RowSum, Sigmoid, Unnormalised
from linvit.attention.softmax import ReluQuadratic
from linvit.conversion.host import Host
from linvit.conversion.hosts.vit import ViTHost

PER_CHANNEL = (ReLU, EluPlusOne, Sigmoid)  # feature maps that do not ask which head a channel is of
MAP_BYTES = 2**22  # of a quadratic map at a time
FEWEST_QUERIES = 64  # at a time: with fewer, reading all keys anew costs more


def fold(model: nn.Module, images: Tensor, *, scales: bool) -> None:
    """Rewrite the hosts of a model at the size of these images; `scales` go into weights in full precision only, for
    half precision has too small a range for what is left of the values."""
    fold_norms(model)
    hosts = [module for module in model.modules() if isinstance(module, Host) and packed(module)]
    keys = keys_seen(model, hosts, images) if scales else {}
    for host in hosts:
        project_apart(host)
        counts = keys.get(id(host), set())
        if len(counts) == 1 and (count := counts.pop()) is not None:
            fold_at(host, count)


def fold_at(host: Any, keys: int) -> None:
    """What can be folded where the number of keys is known."""
    mechanism, values = host.mechanism, host.apart[2]
    width = host.apart[1].out_features // host.num_heads
    if type(mechanism) is ReluQuadratic:
        scale(values, width**-0.5 / keys)
        mechanism.forward = MethodType(attend_by_blocks, mechanism)  # type: ignore[method-assign]
    elif plain(mechanism):
        if isinstance(mechanism.normaliser, Constant):
            scale(values, float(mechanism.normaliser.factor(keys, width)))
            mechanism.normaliser = Unnormalised()
        if linear_throughout(host) and keys > 2 * width:
            join_projections(host, keys, values_last=keys > values.in_features)


def fold_norms(model: nn.Module) -> None:
    """timm's convolutions with a BatchNorm, and perhaps an activation in it, behind them."""
    for module in model.modules():
        conv, norm = getattr(module, "conv", None), getattr(module, "bn", None)
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            behind = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
            module.conv, module.bn = fuse_conv_bn_eval(conv, norm), nn.Sequential(*behind)


def packed(host: Host) -> bool:
    """Whether q, k and v come of one linear map in the usual order."""
    linear = isinstance(getattr(host, "qkv", None), nn.Linear)
    return linear and type(host).project is Host.project and getattr(host, "q_bias", None) is None


def project_apart(host: Any) -> None:
    biases = [None] * 3 if host.qkv.bias is None else host.qkv.bias.chunk(3)
    host.apart = nn.ModuleList()
    for weight, bias in zip(host.qkv.weight.chunk(3), biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone())
        host.apart.append(linear)
    host.qkv = None
    host.project = MethodType(project, host)


def project(self: Host, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(self.split_heads(linear(x)) for linear in self.apart)


def keys_seen(model: nn.Module, hosts: list[Host], images: Tensor) -> dict[int, set[int | None]]:
    """How many keys each host's mechanism sees in a call with these images; None where they are masked or rotated."""
    found: dict[int, set[int | None]] = {id(host): set() for host in hosts}
    owners = {id(host.mechanism): id(host) for host in hosts}

    def note(mechanism: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        bare = named.get("mask") is None and named.get("rotary") is None
        found[owners[id(mechanism)]].add(args[1].shape[2] if bare else None)

    hooks = [host.mechanism.register_forward_pre_hook(note, with_kwargs=True) for host in hosts]
    try:
        with torch.inference_mode():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def scale(linear: nn.Linear, factor: float) -> None:
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.mul_(factor)


def plain(mechanism: Any) -> bool:
    """Whether the linear core is all there is: nothing beside it reads q, k or v."""
    if not isinstance(mechanism, LinearAttention) or mechanism.centre:
        return False
    kind = type(mechanism)
    return (kind.core, kind.enter, kind.finish) == (LinearAttention.core, LinearAttention.enter, Mechanism.finish)


def linear_throughout(host: Host) -> bool:
    """Whether nothing but the mechanism stands between the projections, and that by features of single channels."""
    if type(host) is not ViTHost or host.gate is not None:
        return False
    mechanism: Any = host.mechanism
    known = isinstance(mechanism.normaliser, (Unnormalised, RowSum)) and isinstance(mechanism.feature, PER_CHANNEL)
    norms = all(isinstance(norm, nn.Identity) for norm in (host.q_norm, host.k_norm, host.norm))
    return known and norms and type(mechanism).features is LinearAttention.features and not mechanism.adds_behind


def join_projections(host: Any, keys: int, *, values_last: bool) -> None:
    """Let a ViT's host attend by `attend_and_project`, with what that needs; `values_last` is where the weights of the
    values join the state too."""
    heads, values = (host.num_heads, -1), host.apart[2]
    row_sum = isinstance(host.mechanism.normaliser, RowSum)
    with_bias = values_last and values.bias is not None
    parts = {
        "heads_out": host.proj.weight.mT.unflatten(0, heads),
        "heads_in": values.weight.unflatten(0, heads).mT if values_last else None,
        "values_bias": values.bias.unflatten(0, heads)[:, None] if with_bias else None,
        "head_of": torch.eye(host.num_heads).repeat_interleave(host.head_dim, 0) if row_sum else None,
        # a sum over the tokens as a product, for which every runtime has a fast kernel
        "sum_keys": torch.ones(1, 1, keys) if row_sum or with_bias else None,
    }
    for name, part in parts.items():
        host.register_buffer(name, None if part is None else part.detach().clone())
    host.forward = MethodType(attend_and_project, host)


def attend_and_project(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The forward of a ViT's host with its output projection in the state, and perhaps that of the values."""
    q, k = (self.mechanism.feature(linear(x)) for linear in self.apart[:2])
    heads: tuple[int, int] = (self.num_heads, -1)
    total: Any = None if self.sum_keys is None else self.sum_keys @ k
    if self.heads_in is None:
        state = self.split_heads(k).mT @ self.split_heads(self.apart[2](x))
    else:
        state = (k.mT @ x).unflatten(1, heads) @ self.heads_in
        if self.values_bias is not None:
            state = state + total.unflatten(-1, heads).squeeze(1)[..., None] * self.values_bias
    if self.head_of is not None:
        q = divide(q, q @ (total.mT * self.head_of), self.mechanism.normaliser, k.shape[1])
    out = q @ (state @ self.heads_out).flatten(1, 2)
    return out if self.proj.bias is None else out + self.proj.bias


def divide(q: Tensor, sums: Tensor, norm: RowSum, keys: int) -> Tensor:
    """Features of queries `(batch, tokens, channels)` over their row sums `(batch, tokens, heads)`."""
    eps = norm.eps * keys if norm.per_key else norm.eps
    sums = sums.clamp_min(eps) if norm.clamp else sums + eps
    return (q.unflatten(-1, (sums.shape[-1], -1)) * (1 / sums)[..., None]).flatten(-2)


def attend_by_blocks(
    self: Mechanism, q: Tensor, k: Tensor, v: Tensor, *_: Any, bias: Tensor | None = None, **__: Any
) -> Tensor:
    """ReLU-quadratic attention with its scale in the values, so that a bias is multiplied by √d instead."""
    if bias is not None:
        whole = bias if bias.ndim < 4 else bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        return torch.relu(q @ k.mT + whole * q.shape[-1] ** 0.5) @ v
    rows = max(FEWEST_QUERIES, MAP_BYTES // (4 * q.shape[1] * k.shape[2]))
    blocks = [torch.relu(some @ k.mT) @ v for some in q.split(rows, dim=2)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
