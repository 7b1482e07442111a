"""Detectors and segmenters in a comparison: the architecture as it is written, its model, and the set.

    [architecture]
    model = "faster_rcnn"      # a head's name makes it a comparison of detectors or segmenters
    backbone = "runs/hiera"    # a timm name, or a folder that linvit saved, whose weights every candidate starts from
    pyramid = "adapter"        # where that is a plain ViT

Where the trunk comes from a folder, the identity holds its name in timm, its arguments and, as `trunk`, the digest of
its weights; where the folder lies is no part of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch

from linvit.codec import digest, to_plain
from linvit.comparison.description.job import DataDescription, describe_data, describe_folder
from linvit.comparison.results import Structure
from linvit.conversion import load
from linvit.errors import LinvitError, unknown
from linvit.models.dense import HEADS, DenseModel
from linvit.tasks.dense.fitting import DenseSets
from linvit.tasks.dense.kind import OF_THE_HEAD
from linvit.tasks.dense.readers import open_dense
from linvit.tasks.digests import split_digest


def read_dense(args: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The architecture as the identity holds it, and the folder of its trunk; empty where a timm model is named."""
    args, name = dict(args), args["model"]
    backbone = args.get("backbone")
    if not isinstance(backbone, str) or not backbone:
        raise LinvitError(f'{name} wants a backbone: give backbone = "…", a timm model or a folder that linvit saved')
    if "trunk" in args:
        raise LinvitError("trunk is worked out from the backbone: leave it out of the architecture")
    folder = ""
    if Path(backbone).is_dir():
        folder = backbone
        named, config = describe_folder(folder, "backbone")
        if config.model in HEADS:
            raise LinvitError(f"{folder} is a {config.model}: give the classifier whose trunk is to be used")
        kept = {key: value for key, value in config.args.items() if key not in OF_THE_HEAD}
        kept |= args.get("backbone_args", {})
        args |= {"backbone": config.model, "backbone_args": kept, "trunk": named.digest}
    elif not timm.is_model(backbone) or backbone in HEADS:
        raise unknown("backbone", backbone, set(timm.list_models()) - HEADS.keys())
    args.pop("num_classes", None)
    return to_plain(args), folder


def load_trunk(folder: str, wanted: str) -> Any:
    """The classifier in a folder, if its weights are those that are wanted."""
    if not folder:
        raise LinvitError("the backbone's weights come from a folder that linvit saved: say where it is (--backbone)")
    found = describe_folder(folder, "backbone")[0].digest
    if found != wanted:
        raise LinvitError(f"{folder} is not the backbone this run is about: its digest is {found}, not {wanted}")
    return load(folder)


def build_dense(structure: Structure, *, seed: int = 0) -> DenseModel:
    """The structure's detector or segmenter with softmax attention and random weights. A trunk that takes one image
    size only is built for the structure's."""
    args = {key: value for key, value in structure.architecture.items() if key not in ("model", "trunk")}
    args = {**with_tuples(args), "num_classes": structure.classes}
    if "backbone_args" in args:
        args["backbone_args"] = with_tuples(args["backbone_args"])
    name = structure.head
    model = create(name, args, seed)
    only = model.backbone.layout.size
    if only is not None and max(only) != structure.size:
        args["backbone_args"] = {**args.get("backbone_args", {}), "img_size": structure.size}
        model = create(name, args, seed)
    input_size = (3, structure.size, structure.size)
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "input_size": input_size}
    return model


def with_tuples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as timm's models take them: files know lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}


def create(name: str, args: dict[str, Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: Any = timm.create_model(name, **args)
        except LinvitError:
            raise
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise LinvitError(f"{name} cannot be built with {args}: {error}") from None
    model.linvit_origin = {"name": name, "args": args}
    return model


def open_dense_sets(data: str, root: str, head: str) -> DenseSets:
    """The set of a comparison, which needs both splits."""
    kind = HEADS[head]
    train, validation = open_dense(data, kind.task, masks=kind.masks, root=root or None)
    if validation is None:
        raise LinvitError(f"{data} has no validation split: give one, for candidates are compared on it")
    return DenseSets(train, validation)


def describe(data: str, root: str, head: str, task: str = "") -> DataDescription:
    """A set for a head; without one, for classifiers, or for backbones, which can do without labels."""
    if not head:
        return describe_data(data, root, unlabelled=task == "features")
    sets = open_dense_sets(data, root, head)
    assert sets.validation is not None
    key = digest([split_digest(sets.train), split_digest(sets.validation)])
    return DataDescription(Path(data).name, key, len(sets.train.categories), len(sets.train), len(sets.validation))
