"""linvit makes the attention of vision transformers linear, and shows honestly what that buys.

Everything public is here or one level below, in `linvit.attention`, `linvit.conversion` and the other rooms. Importing
linvit registers the papers' models with timm. What trains and compares is imported when it is first asked for, so that
this costs little more than importing timm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linvit import starting  # noqa: F401  # before what takes long
from linvit.attention import Capabilities, Mechanism, Rotary, TokenGrid, create_attention, list_mechanisms, register
from linvit.conversion import (
    Choice,
    Plan,
    Rule,
    convert,
    list_plans,
    load,
    load_weights,
    model_card,
    push_to_hub,
    resample_patches,
    resample_windows,
    save,
)
from linvit.errors import LinvitError
from linvit.models import list_models
from linvit.version import __version__

if TYPE_CHECKING:
    from linvit.comparison import compare, report
    from linvit.runtimes import export
    from linvit.tasks import evaluate, predict, train
    from linvit.training import list_recipes, recipe

__all__ = [
    "Capabilities",
    "Choice",
    "LinvitError",
    "Mechanism",
    "Plan",
    "Rotary",
    "Rule",
    "TokenGrid",
    "__version__",
    "compare",
    "convert",
    "create_attention",
    "evaluate",
    "export",
    "list_mechanisms",
    "list_models",
    "list_plans",
    "list_recipes",
    "load",
    "load_weights",
    "model_card",
    "predict",
    "push_to_hub",
    "recipe",
    "register",
    "report",
    "resample_patches",
    "resample_windows",
    "save",
    "train",
]

LAZY = {
    "comparison": ("compare", "report"),
    "runtimes": ("export",),
    "tasks": ("evaluate", "predict", "train"),
    "training": ("list_recipes", "recipe"),
}


def __getattr__(name: str) -> Any:
    """Import a function that needs much when it is first asked for."""
    for room, names in LAZY.items():
        if name in names:
            return getattr(import_module(f"linvit.{room}"), name)
    raise AttributeError(f"module 'linvit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
