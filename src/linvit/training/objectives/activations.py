"""Activations inside a model, recorded by hooks that are idle otherwise.

Hooks are set when an objective is made and not in its call, which may be compiled; the compiler follows hooks that are
there before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linvit.errors import LinvitError

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Activations:
    """The calls and outputs of named modules between `record` and `take`. With `cut`, gradients stop at both ends of a
    module: it learns from its own output alone, and the model goes on as if nothing were learnt."""

    def __init__(
        self, model: nn.Module, calls: Iterable[str] = (), outputs: Iterable[str] = (), *, cut: bool = False
    ) -> None:
        self.cut, self.recording = cut, False
        self.calls: dict[str, Call] = {}
        self.outputs: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        calls, outputs = list(calls), list(outputs)
        for name in dict.fromkeys((*calls, *outputs)):
            if name not in modules:
                raise LinvitError(f"{type(model).__name__} has no module '{name}'")
        for name in calls:
            hook = modules[name].register_forward_pre_hook(partial(self.before, name), with_kwargs=True)
            self.handles.append(hook)
        for name in outputs:
            self.handles.append(modules[name].register_forward_hook(partial(self.after, name)))

    def before(self, name: str, module: nn.Module, args: Any, named: dict[str, Any]) -> Call | None:
        if not self.recording:
            return None
        self.calls[name] = (detached(args), detached(named))
        return self.calls[name] if self.cut else None

    def after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.recording:
            return None
        self.outputs[name] = first_tensor(output)
        return detached(output) if self.cut else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()

    def record(self) -> None:
        self.recording = True

    def take(self) -> tuple[dict[str, Call], dict[str, Tensor]]:
        """What was recorded; nothing of it is kept."""
        self.recording = False
        calls, outputs = self.calls, self.outputs
        self.calls, self.outputs = {}, {}
        return calls, outputs


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same containers with each tensor mapped. In plain words, which the compiler follows."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item) for item in tree)
    return {key: map_tensors(function, item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def detached(tree: Any) -> Any:
    """Tensors, also inside containers, without their history."""
    return map_tensors(Tensor.detach, tree)


def first_tensor(output: Any) -> Tensor:
    """The tensor in a module's output: some modules give more beside it, a size say."""
    while isinstance(output, tuple | list):
        output = output[0]
    return output
