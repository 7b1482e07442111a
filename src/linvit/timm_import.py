"""Lets `import linvit` register its models with timm without waiting for timm and PyTorch to load.

When timm is loaded already the models are registered at once, else as soon as it is, whoever imports it. So
`timm.create_model("qtvit_1")` works whichever of the two came first, and `linvit --help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODELS = "linvit.models"


def register_models() -> None:
    """Register the models now, or as soon as timm is imported."""
    if "timm" in sys.modules:
        import_module(MODELS)
    else:
        sys.meta_path.insert(0, AfterTimm())


class AfterTimm(MetaPathFinder):
    """Watches the imports of timm and of linvit's own modules, and registers the models when the outermost is done.

    Not earlier: a linvit module may import timm while it is only half loaded, and the models need it whole.
    """

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "timm" and not name.startswith("linvit."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            self.depth += 1
            try:
                load(module)
            finally:
                self.depth -= 1
            if not self.depth and "timm" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                import_module(MODELS)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
