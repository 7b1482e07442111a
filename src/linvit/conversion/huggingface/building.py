"""Models of transformers from their configs: how `linvit.save` notes them and `linvit.load` builds them again."""

import copy
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from linvit.errors import LinvitError, reason, unknown

PREFIX = "transformers:"  # before a class's name, where a saved model's config has a timm name else


def from_config(name: str, config: dict[str, Any]) -> nn.Module:
    """A model of transformers by the name of its class, from its config and without weights."""
    cls: Any = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise unknown("model of transformers", name, (n for n in dir(transformers) if n.endswith(("Model", "ation"))))
    kind: Any = cls.config_class
    try:
        return cls(kind.from_dict(harmless(config)))
    except Exception as error:  # whatever its config and constructor make of the values
        raise LinvitError(f"transformers' {name} cannot be built from its config: {reason(error)}") from error


def harmless(config: Any) -> Any:
    """The config without what names an implementation of attention: transformers may fetch and run it by its name."""
    if isinstance(config, dict):
        return {key: harmless(value) for key, value in config.items() if "implementation" not in str(key)}
    return copy.deepcopy(config)


def origin_of(model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """The name and the config that build this model."""
    return PREFIX + type(model).__name__, model.config.to_diff_dict()
