"""Listening to modules inside a model: what goes into them and what comes out, by hooks that are idle otherwise.

Hooks are set when an objective is made and not in its call, which may be compiled; the compiler follows hooks that are
there before it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linvit.errors import LinvitError

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Taps:
    """The calls and outputs of named modules between `listen` and `take`. With `cut`, gradients stop at both ends of a
    module: it learns from its own output alone, and the model goes on as if nothing were learnt."""

    def __init__(self, model: nn.Module, names: Iterable[str], *, cut: bool = False) -> None:
        self.names, self.cut = list(names), cut
        self.listening = False
        self.calls: dict[str, Call] = {}
        self.outputs: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        for name in self.names:
            if name not in modules:
                raise LinvitError(f"{type(model).__name__} has no module '{name}'")
            module = modules[name]
            self.handles.append(module.register_forward_pre_hook(partial(self.before, name), with_kwargs=True))
            self.handles.append(module.register_forward_hook(partial(self.after, name)))

    def before(self, name: str, module: nn.Module, args: Any, named: dict[str, Any]) -> Call | None:
        if not self.listening:
            return None
        self.calls[name] = (detached(args), detached(named))
        return self.calls[name] if self.cut else None

    def after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.listening:
            return None
        self.outputs[name] = main(output)
        return detached(output) if self.cut else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()

    def listen(self) -> None:
        self.listening = True

    def take(self) -> tuple[dict[str, Call], dict[str, Tensor]]:
        """What was heard; nothing of it is kept."""
        self.listening = False
        calls, outputs = self.calls, self.outputs
        self.calls, self.outputs = {}, {}
        return calls, outputs


def detached(value: Any) -> Any:
    """Tensors, also inside containers, without their history."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(detached(item) for item in value)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return value


def main(output: Any) -> Tensor:
    """The tensor in a module's output: some modules give more beside it, a size say."""
    while isinstance(output, tuple | list):
        output = output[0]
    return output
