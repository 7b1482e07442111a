"""The same function in fewer steps: what is rewritten in a model's copy before it is traced. Each rewriting is exact
but for rounding, which verification against the model itself sees to.

- One packed projection becomes three, so that no runtime has to cut and move what it has just written.
- A constant that only scales goes into the weights that make the values: SteLLA's 1/(N·√d).
- Where the attention is linear all the way, the output projection joins the state, which is small:
  phi(q) · (phi(k)ᵀ · v) · W = phi(q) · ((phi(k)ᵀ · v) · W), with a product less over the tokens.
- BatchNorm goes into the convolution before it.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from linvit.attention import Constant, EluPlusOne, LinearAttention, Mechanism, ReLU, Sigmoid, Unnormalised
from linvit.conversion.host import Host
from linvit.conversion.hosts.vit import ViTHost

PER_CHANNEL = (ReLU, EluPlusOne, Sigmoid)  # feature maps that do not ask which head a channel is of


def fold(model: nn.Module, images: Tensor, *, scales: bool) -> None:
    """Rewrite the hosts of a model at the size of these images; `scales` go into weights in full precision only, for
    half precision has too small a range for what is left of the values."""
    fold_norms(model)
    hosts = [module for module in model.modules() if isinstance(module, Host) and packed(module)]
    keys = keys_seen(model, hosts, images) if scales else {}
    for host in hosts:
        project_apart(host)
        counts = keys.get(id(host), set())
        if len(counts) == 1 and only_scaled(host.mechanism):
            (count,) = counts
            fold_scale(host, count)
            if linear_throughout(host) and count > 2 * host.head_dim:
                host.heads_out = nn.Buffer(host.proj.weight.detach().mT.unflatten(0, (host.num_heads, -1)).clone())
                host.forward = MethodType(attend_and_project, host)  # type: ignore[method-assign]


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


def keys_seen(model: nn.Module, hosts: list[Host], images: Tensor) -> dict[int, set[int]]:
    """How many keys each host's mechanism sees in a call with these images."""
    found: dict[int, set[int]] = {id(host): set() for host in hosts}
    owners = {id(host.mechanism): id(host) for host in hosts}

    def note(mechanism: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        found[owners[id(mechanism)]].add(args[1].shape[2])

    hooks = [host.mechanism.register_forward_pre_hook(note, with_kwargs=True) for host in hosts]
    try:
        with torch.inference_mode():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def only_scaled(mechanism: Any) -> bool:
    """Whether a constant of the size is all that normalises, and nothing beside the linear core reads v."""
    bare = isinstance(mechanism, LinearAttention) and isinstance(mechanism.normaliser, Constant)
    return bare and type(mechanism).finish is Mechanism.finish and type(mechanism).core is LinearAttention.core


def fold_scale(host: Host, keys: int) -> None:
    mechanism: Any = host.mechanism
    values = host.apart[2]
    factor = float(mechanism.normaliser.factor(keys, host.apart[1].weight.shape[0] // host.num_heads))
    with torch.no_grad():
        for parameter in values.parameters():
            parameter *= factor
    mechanism.normaliser = Unnormalised()


def linear_throughout(host: Host) -> bool:
    """Whether nothing but the mechanism stands between the projections, and that by features of single channels."""
    if type(host) is not ViTHost or host.gate is not None:
        return False
    mechanism: Any = host.mechanism
    own = type(mechanism).features is LinearAttention.features and isinstance(mechanism.feature, PER_CHANNEL)
    plain = all(isinstance(norm, nn.Identity) for norm in (host.q_norm, host.k_norm, host.norm))
    return own and plain and type(mechanism).after_projection is Mechanism.after_projection


def attend_and_project(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The forward of a ViT's host with its output projection in the state."""
    q, k, v = (linear(x) for linear in self.apart)
    feature = self.mechanism.feature
    state = self.split_heads(feature(k)).mT @ self.split_heads(v)
    out = feature(q) @ (state @ self.heads_out).flatten(1, 2)
    return out if self.proj.bias is None else out + self.proj.bias
