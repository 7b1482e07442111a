"""Every family of hosts: nothing lost, nothing changed for the native mechanism, any size, traced in one graph."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import nn

from linvit.attention import create_attention
from linvit.attention.local import GridConv, NormShortcut, TokenConv
from linvit.conversion import convert, find_hosts
from linvit.conversion.convert import asks_of
from tests.conversion.families import FAMILIES, Family, permitting

every = pytest.mark.parametrize("family", FAMILIES, ids=str)


@every
def test_native_mechanism_changes_nothing(family: Family) -> None:
    original = family.build().double()
    converted = copy.deepcopy(original)
    report = convert(converted, family.native)
    assert len(report.layers) == len(find_hosts(original)) > 0 and report.new_parameters == 0
    image = family.image().double()
    for model in (original, converted):
        model(image).square().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(converted(image), original(image), rtol=1e-5, atol=1e-5)
    after = dict(converted.named_parameters())
    noise = 1e-12 * max(float(p.grad.abs().max()) for p in original.parameters() if p.grad is not None)
    for name, before in original.named_parameters():
        twin = after.pop(name)
        assert before.grad is not None and twin.grad is not None
        assert (before.grad - twin.grad).abs().max() <= 1e-4 * before.grad.abs().max() + noise, name
    assert not after


@every
@pytest.mark.parametrize("plan", ["stella", "castling"])  # one without parameters of its own, one with
def test_weights_stay_and_an_original_checkpoint_loads(family: Family, plan: str) -> None:
    original = family.build()
    converted = copy.deepcopy(original)
    report = convert(converted, permitting(plan))
    before, after = original.state_dict(), converted.state_dict()
    removed = {name for name in before if name not in after}
    assert removed == set(report.removed)
    for name in before.keys() - removed:
        assert torch.equal(before[name], after[name]), name
    other = {name: tensor + 1 for name, tensor in before.items()}
    missing, unexpected = converted.load_state_dict(other, strict=False)
    assert set(unexpected) <= removed and all(".mechanism." in name for name in missing)
    assert all(torch.equal(converted.state_dict()[name], other[name]) for name in before.keys() - removed)


@every
@pytest.mark.parametrize("plan", ["stella", "relu_quadratic", "castling", "cosformer"])
def test_any_size_forward_and_backward(family: Family, plan: str) -> None:
    model = family.build()
    convert(model, permitting(plan))
    for height, width in family.sizes:
        out = model(family.image(height, width))
        assert out.shape == (2, 7) and out.isfinite().all()
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@every
def test_what_cannot_be_honoured_is_refused_and_nothing_touched(family: Family) -> None:
    model = family.build()
    types = [type(module) for module in model.modules()]
    stella = create_attention("stella")
    asks = [ask for _, m in find_hosts(model) for ask in asks_of(model, m) if not ask.honoured_by(stella)]
    if not asks:
        convert(model, "stella")
        return
    from linvit import LinvitError

    with pytest.raises(LinvitError, match=r"drop=\('"):
        convert(model, "stella")
    assert [type(module) for module in model.modules()] == types


@every
def test_converting_again_replaces_the_mechanism(family: Family) -> None:
    model, direct = family.build(), family.build()
    convert(model, permitting("relu_quadratic"))
    again = convert(model, permitting("stella"))
    convert(direct, permitting("stella"))
    assert {layer.before for layer in again.layers} == {"relu_quadratic"}
    with torch.no_grad():
        torch.testing.assert_close(model(family.image()), direct(family.image()))


@every
def test_bfloat16_copy_and_pickle(family: Family) -> None:
    model = family.build()
    convert(model, permitting("stella"))
    with torch.no_grad():
        reference = model(family.image())
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(twin(family.image()), reference)
        half = copy.deepcopy(model).bfloat16()(family.image().bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(half.float(), reference).min() > 0.98


def kind(family: Family) -> str:
    """The file of timm that it is from."""
    return timm.model_entrypoint(family.model).__module__


FIRST = {kind(family): family for family in reversed(FAMILIES) if family.traces}  # tracing is slow: one of each kind
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def calls(model: nn.Module, image: torch.Tensor) -> list[Call]:
    """The first host of each class in a model, and what it is called with."""
    found: dict[type, Call] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(type(module), (module, args, kwargs))

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for _, module in find_hosts(model)]
    model(image)
    for handle in handles:
        handle.remove()
    return list(found.values())


def compiles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reference = module(*args, **kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args, **kwargs), reference)


def exports(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reference = module(*args, **kwargs)
    exported = torch.export.export(module, args, kwargs).module()
    torch.testing.assert_close(exported(*args, **kwargs), reference)


@pytest.mark.parametrize("family", FIRST.values(), ids=str)
def test_hosts_compile_as_one_graph_and_export(family: Family) -> None:
    model = family.build()
    convert(model, permitting("stella"))
    with torch.no_grad():
        for call in calls(model, family.image()):
            compiles(*call)
            exports(*call)


# One for every way in which a grid reaches a host, and one whose hosts see it themselves.
WHOLE = (
    "deit_tiny",
    "pit_ti",
    "csatv2",
    "mobilevit",
    "caformer",
    "nextvit",
    "edgenext",
    "nest",
    "crossvit",
    "swin_tiny",
)


@pytest.mark.parametrize("family", [next(f for f in FIRST.values() if f.model.startswith(n)) for n in WHOLE], ids=str)
def test_whole_models_compile_as_one_graph(family: Family) -> None:
    model = family.build()
    convert(model, permitting("stella"))
    with torch.no_grad():
        compiles(model, (family.image(),), {})


@every
def test_report_says_what_happened(family: Family) -> None:
    model = family.build()
    text = str(convert(model, permitting("stella")))
    assert f"{family.native} → stella" in text
    for name, _ in find_hosts(model):
        assert name in text


def test_a_model_built_for_another_image_size_is_probed_at_that_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=1, embed_dim=48, num_classes=7)
    convert(model, "qt")
    assert model(torch.randn(2, 3, 64, 96)).isfinite().all()


@pytest.mark.parametrize("plan", ["castling", "qt", "focused", "agent"])
def test_local_branches_of_a_converted_model_start_at_zero_and_learn(plan: str) -> None:
    """Nothing random is added to pretrained features; gradients reach the branches all the same."""
    for quiet in (True, False):
        torch.manual_seed(0)
        small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", **small, class_token=False, global_pool="avg")
        convert(model, plan, quiet=quiet)
        branches = [m for m in model.modules() if isinstance(m, GridConv | TokenConv | NormShortcut)]
        values = [p for branch in branches for p in branch.parameters()]
        assert branches and all(bool((p == 0).all()) for p in values) == quiet
        model.train()(torch.randn(4, 3, 32, 32)).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in values)
