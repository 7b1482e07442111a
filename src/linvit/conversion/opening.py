"""Models by name: a folder that linvit saved, or a timm model. Where its weights came from is noted on the model, so
that what is made of it can find its original again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import nn

from linvit.conversion.saving import load
from linvit.conversion.weights import load_weights
from linvit.errors import LinvitError, unknown_model


def open_model(
    name: str,
    *,
    pretrained: bool = True,
    args: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    what: str = "model",
    instead: str = "--no-pretrained",
) -> nn.Module:
    """The model with its weights: from a folder of ours, or from timm, pretrained or with a checkpoint's. `what` it is
    and `instead` of timm's weights what to give are said in errors."""
    if Path(name).is_dir():
        if args:
            raise LinvitError(f"{name} is a saved model, which is built as it was: leave out --model-arg")
        model = load(name)
        if checkpoint is not None:
            load_weights(model, checkpoint)
            del model.linvit_source
        return model
    fetched = pretrained and checkpoint is None
    model = create(name, fetched, dict(args or {}), what, instead)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    source = {"model": name, "args": dict(args or {}), "pretrained": fetched}
    model.linvit_source = source if checkpoint is None else {**source, "checkpoint": str(checkpoint.resolve())}  # type: ignore[assignment]
    return model


def create(name: str, pretrained: bool, args: dict[str, Any], what: str, instead: str) -> nn.Module:
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise unknown_model(what, name, timm.list_models())
    if pretrained:
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it tells of every retry; one line comes at the end
        if sys.stderr.isatty():
            print(f"fetching the weights of {name}", file=sys.stderr)
    try:
        return timm.create_model(name, pretrained=pretrained, **args)
    except LinvitError:
        raise
    except Exception as error:  # whatever the hub, the network or the model's constructor makes of it
        if not pretrained:
            raise LinvitError(f"{name} cannot be built with {args}: {error}") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
        raise LinvitError(f"cannot get the pretrained weights of {name} ({reason}); give {instead}") from error


def open_original(converted: nn.Module, name: str) -> nn.Module:
    """The model that a converted one was made from, or one line that says why it is not to be had."""
    conversions = getattr(converted, "linvit_conversions", [])
    if not conversions:
        raise LinvitError("the recipe learns from a teacher: give --teacher, or --plan to learn from the original")
    source = conversions[0].get("source") or {}
    if "folder" in source and Path(source["folder"]).is_dir():
        return load(source["folder"])
    checkpoint = Path(source["checkpoint"]) if "checkpoint" in source else None
    gone = source.get("folder") or (checkpoint if checkpoint is not None and not checkpoint.is_file() else None)
    if gone or not source or not (source["pretrained"] or checkpoint):
        known = "random weights" if source else "a model that is not known"
        raise LinvitError(f"{name} was made from {f'{gone}, which is gone' if gone else known}: give --teacher")
    return open_model(source["model"], args=source["args"], checkpoint=checkpoint, what="teacher", instead="--teacher")
