"""What of a model is exported: its plain formulas at one size, or for any size, traced by `torch.export`.

No kernel of ours leaks into a program. On the CPU every mechanism has its reference, in the order of products that is
cheaper at the size; for any size the linear order, since which is cheaper is a question to one size.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from timm.layers.format import Format
from timm.models import deit, eva, vision_transformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from linvit.attention import Mechanism
from linvit.conversion import resample
from linvit.conversion.convert import own_size
from linvit.conversion.host import Host
from linvit.conversion.rebuilding import inner
from linvit.errors import LinvitError, reason
from linvit.runtimes.folding import fold


def standing_twin(model: nn.Module, size: tuple[int, int] | None, dynamic: bool) -> nn.Module:
    """A copy on the CPU, in float32 and evaluation mode, at another size or for any size: what an export must equal."""
    twin = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().eval()
    if size is not None and size != own_size(inner(twin)):
        resample(inner(twin), size=size)
    if dynamic:
        take_any_size(twin)
    return twin


def take_any_size(model: nn.Module) -> None:
    """Let a ViT built for one size resample its positions in every call, as timm's `dynamic_img_size` does."""
    for module in model.modules():
        if isinstance(module, Mechanism):
            can = module.capabilities
            if not (can.dynamic and can.any_tokens):
                raise LinvitError(f"{module.name} fixes the size in an exported program: leave --dynamic out")
        if isinstance(module, VisionTransformer) and not module.dynamic_img_size:
            embed: Any = module.patch_embed
            setattr(module, "dynamic_img_size", True)  # noqa: B010, timm calls it final
            embed.strict_img_size = False
            embed.flatten, embed.output_fmt = False, Format.NHWC


def exported_twin(twin: nn.Module, images: Tensor, *, dynamic: bool, precision: str) -> nn.Module:
    """The twin as it goes into the program."""
    made = copy.deepcopy(twin)
    for module in made.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference" if dynamic and module.capabilities.linear else "auto"
    fold(made, images, scales=precision == "fp32" and not dynamic)
    return made


def resampled_positions(table: Tensor, new_size: Any, old_size: Any, num_prefix_tokens: int = 1, **_: Any) -> Tensor:
    """timm's `resample_abs_pos_embed` as two matrix products. Antialiased bicubic resizing is linear in the table and
    apart in rows and columns; runtimes lack it as an operation, or take it at one size only."""
    prefix, patches = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    grid = patches.unflatten(1, tuple(old_size)).permute(0, 3, 1, 2)
    rows, columns = (bicubic(old, new) for old, new in zip(old_size, new_size, strict=True))
    return torch.cat((prefix, (rows @ grid @ columns.mT).flatten(2).mT), dim=1)


def bicubic(old: int, new: Any) -> Tensor:
    """The matrix `(new, old)` of antialiased bicubic resizing along one side."""
    scale = torch.full((), float(old)) / new
    wide = scale.clamp_min(1.0)
    centres = (torch.arange(new)[:, None] + 0.5) * scale
    x = ((torch.arange(old) + 0.5 - centres) / wide).abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2  # Keys' kernel, a = −1/2
    weight = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros(())))
    return weight / weight.sum(1, keepdim=True)


def trace(model: nn.Module, images: Tensor, *, dynamic: bool) -> ExportedProgram:
    """The program, or one line that says what of the model cannot be one."""
    dims = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC} if dynamic else None
    try:
        with torch.no_grad(), ExitStack() as stack:
            for module in (vision_transformer, deit, eva):
                stack.enter_context(patch.object(module, "resample_abs_pos_embed", resampled_positions))
            program = torch.export.export(model, (images,), dynamic_shapes=(dims,) if dims else None)
    except LinvitError:
        raise
    except Exception as error:  # dynamo's many; each says first what is wrong
        if dynamic:
            why = f"{type(model).__name__} fixes its size ({reason(error)})"
            raise LinvitError(f"{why}: leave --dynamic out") from error
        raise LinvitError(f"torch.export cannot trace {type(model).__name__}: {reason(error)}") from error
    ours = [node for node in program.graph.nodes if str(node.target).startswith("linvit.")]
    if ours:
        raise LinvitError(f"an operator of ours would be in the program, {ours[0].target}: report this, please")
    return program


def layer_names(model: nn.Module) -> list[str]:
    """The layers whose outputs are looked at when an export departs: blocks with attention and their parts, and the
    parts of the model."""
    hosts = [name for name, module in model.named_modules() if isinstance(module, Host) or is_attention(module)]
    blocks = {name.rpartition(".")[0] for name in hosts} | {""}
    return [name for name, _ in model.named_modules() if name and (name in blocks or name.rpartition(".")[0] in blocks)]


def is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def layer_nodes(program: ExportedProgram, layers: list[str]) -> dict[str, str]:
    """By layer, the node of the program that computes its output: the last one traced inside it. In the order of the
    program, a part before what it is the last part of."""
    wanted, found = set(layers), {}
    for place, node in enumerate(program.graph.nodes):
        for name, _ in (node.meta.get("nn_module_stack") or {}).values():
            if name in wanted:
                found[name] = (place, -name.count("."), computed(node).name)
    return {name: found[name][2] for name in sorted(found, key=lambda name: found[name][:2])}


def computed(node: Any) -> Any:
    """A node, or what it hands on: dropout is in the program, but no runtime keeps it."""
    return computed(node.args[0]) if "dropout" in str(node.target) else node


@contextmanager
def watching(model: nn.Module, layers: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of the layers while the model runs, in the order in which they come."""
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                found[name] = out

        return hook

    hooks = [modules[name].register_forward_hook(keep(name)) for name in layers]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def watch_layers(model: nn.Module, layers: Collection[str], images: Tensor) -> dict[str, Tensor]:
    """The outputs of the layers for images."""
    with watching(model, layers) as found, torch.inference_mode():
        model(images)
    return found


class WithLayers(nn.Module):
    """A model that gives what its layers give behind its own outputs, for files that do not show their insides."""

    def __init__(self, model: nn.Module, layers: Collection[str]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, images: Tensor) -> tuple[Any, ...]:
        with watching(self.model, self.layers) as found:
            out = self.model(images)
        return out, *found.values()
