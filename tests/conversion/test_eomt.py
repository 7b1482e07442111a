"""EoMT, tiny and random: softmax exact with and without masks, any mechanism without, the grid with its queries."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import LinvitError
from linvit.conversion import Choice, Plan, Rule, find_hosts
from tests.conversion.families import permitting

transformers = pytest.importorskip("transformers")

QUERIES, REGISTERS, LAYERS, LAST = 5, 2, 3, 2
SMALL: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
    "num_blocks": LAST, "num_queries": QUERIES, "num_register_tokens": REGISTERS, "num_labels": 4,
    "train_num_points": 32,
}  # fmt: skip
KINDS = {"Eomt": {"mlp_ratio": 2}, "EomtDinov3": {"intermediate_size": 48, "pos_embed_rescale": None}}
every = pytest.mark.parametrize("kind", KINDS)


def build(kind: str = "Eomt", *, masks: float = 0.0, seed: int = 0, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **KINDS[kind], **more)
    model = getattr(transformers, f"{kind}ForUniversalSegmentation")(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.attn_mask_probs.fill_(masks)
    return model.eval()


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def out(model: nn.Module, picture: Tensor | None = None) -> Tensor:
    found = model(image() if picture is None else picture)
    return torch.cat((found.masks_queries_logits.flatten(1), found.class_queries_logits.flatten(1)), dim=1)


@every
@pytest.mark.parametrize("masks", [0.0, 1.0])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_softmax_changes_nothing(kind: str, masks: float, implementation: str) -> None:
    original = build(kind, masks=masks, attn_implementation=implementation)
    converted = copy.deepcopy(original)
    report = linvit.convert(converted, "softmax")
    assert len(report.layers) == LAYERS and report.new_parameters == 0 and not report.removed
    with torch.no_grad():
        torch.testing.assert_close(out(converted), out(original), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(out(original), out(build(kind, masks=1 - masks)), atol=1e-3)


@every
@pytest.mark.parametrize("plan", ["stella", "castling", "inline", "fastformer", "qt"])
def test_weights_stay_and_any_mechanism_works(kind: str, plan: str) -> None:
    original = build(kind)
    model = copy.deepcopy(original)
    linvit.convert(model, permitting(plan))
    before, after = original.state_dict(), model.state_dict()
    assert before.keys() <= after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    result = out(model)
    assert result.isfinite().all() and not torch.allclose(result, out(original))
    result.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_block_computes_its_mechanism() -> None:
    model = build()
    linvit.convert(model, "relu_linear")
    host = find_hosts(model)[-1][1]
    seen: list[tuple[Tensor, Tensor]] = []
    host.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    with torch.no_grad():
        out(model)
        ((x, found),) = seen
        q, k, v = (projection(x).unflatten(-1, (3, 8)) for projection in (host.q_proj, host.k_proj, host.v_proj))
        weights = torch.einsum("bnhd,bmhd->bhnm", q.relu(), k.relu())
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        expected = host.out_proj(torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every
def test_queries_are_a_prefix_in_the_last_blocks(kind: str) -> None:
    model = build(kind)
    linvit.convert(model, permitting("castling"))
    seen: list[linvit.TokenGrid] = []
    for _, host in find_hosts(model):
        host.mechanism.register_forward_pre_hook(lambda module, args: seen.append(args[3]))
    with torch.no_grad():
        out(model)
    first, last = linvit.TokenGrid(4, 4, 1 + REGISTERS), linvit.TokenGrid(4, 4, QUERIES + 1 + REGISTERS)
    assert seen == [first] * (LAYERS - LAST) + [last] * LAST


@every
@pytest.mark.parametrize("masks", [0.0, 1.0])
def test_mechanisms_are_built_for_the_tokens_they_will_see(kind: str, masks: float) -> None:
    model = build(kind, masks=masks)
    linvit.convert(model, permitting("linformer"))
    tokens = [host.mechanism.shape.grid.tokens for _, host in find_hosts(model)]
    assert tokens == [1 + REGISTERS + 16] * (LAYERS - LAST) + [QUERIES + 1 + REGISTERS + 16] * LAST
    model.attn_mask_probs.zero_()
    with torch.no_grad():
        assert out(model).isfinite().all()


@every
def test_masks_are_refused_where_there_are_no_logits(kind: str) -> None:
    model = build(kind, masks=1.0)
    linvit.convert(model, permitting("stella"))
    for mode in (model.eval(), model.train()):
        with pytest.raises(LinvitError, match=r"set model\.attn_mask_probs to 0"):
            mode(image())
    with pytest.raises(LinvitError, match=r"set model\.attn_mask_probs to 0"):
        pickle.loads(pickle.dumps(copy.deepcopy(model)))(image())
    again = build(kind, masks=1.0)
    early = Plan("early", None, (Rule(Choice("stella"), layers=tuple(range(LAYERS - LAST))),))
    linvit.convert(again, early)
    with torch.no_grad():
        assert out(again).isfinite().all()


@every
def test_trains_without_masks(kind: str) -> None:
    """In training EoMT makes masks even at probability 0; they mask nothing."""
    model = build(kind)
    linvit.convert(model, permitting("stella"))
    truths = torch.zeros(2, 32, 32)
    truths[0, :16], truths[1, 16:] = 1, 1
    loss = model.train()(image(), mask_labels=[truths] * 2, class_labels=[torch.tensor([0, 3])] * 2).loss
    loss.backward()
    assert loss.isfinite()
    assert all(host.q_proj.weight.grad.isfinite().all() for _, host in find_hosts(model))
    with torch.no_grad():
        torch.testing.assert_close(out(model.train()), out(model.eval()))


@every
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    linvit.convert(model, permitting("stella"))
    linvit.save(model, tmp_path)
    again = linvit.load(tmp_path)
    assert type(again) is type(model) and not again.attn_mask_probs.any()
    with torch.no_grad():
        assert torch.equal(out(again), out(model))
