"""Deformable attention against transformers' implementations, gradients included."""

import pytest
import torch

from linvit import LinvitError
from linvit.models.backbones.deformable import DeformableAttention, sample

SHAPES = [(5, 7), (3, 4), (1, 2)]
TOKENS = sum(height * width for height, width in SHAPES)


def test_sampling() -> None:
    mask2former = pytest.importorskip("transformers.models.mask2former.modeling_mask2former")
    torch.manual_seed(0)
    value = torch.randn(2, TOKENS, 3, 4, dtype=torch.double)
    places = torch.rand(2, 6, 3, len(SHAPES), 4, 2, dtype=torch.double) * 1.4 - 0.2  # some outside
    weights = torch.rand(2, 6, 3, len(SHAPES), 4, dtype=torch.double)
    found = []
    for function in (sample, mask2former.multi_scale_deformable_attention):
        given = [tensor.clone().requires_grad_() for tensor in (value, places, weights)]
        out = function(given[0], SHAPES, *given[1:])
        out.sin().sum().backward()
        found.append([out, *(tensor.grad for tensor in given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_layer() -> None:
    detr = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    config = detr.DeformableDetrConfig(d_model=24, num_feature_levels=len(SHAPES))
    torch.manual_seed(0)
    theirs = detr.DeformableDetrMultiscaleDeformableAttention(config, num_heads=6, n_points=4).double()
    ours = DeformableAttention(24, len(SHAPES), heads=6).double()
    names = {"offsets": "sampling_offsets", "weights": "attention_weights", "value": "value_proj", "out": "output_proj"}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    for own, other in names.items():
        getattr(ours, own).load_state_dict(getattr(theirs, other).state_dict())
    query = torch.randn(2, 9, 24, dtype=torch.double, requires_grad=True)
    tokens = torch.randn(2, TOKENS, 24, dtype=torch.double, requires_grad=True)
    places = torch.rand(9, len(SHAPES), 2, dtype=torch.double)
    out = ours(query, places, tokens, SHAPES)
    reference, _ = theirs(
        query,
        encoder_hidden_states=tokens,
        reference_points=places[None],
        spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES,
    )
    torch.testing.assert_close(out, reference)
    mine = torch.autograd.grad(out.square().sum(), (query, tokens, ours.offsets.weight))
    other = torch.autograd.grad(reference.square().sum(), (query, tokens, theirs.sampling_offsets.weight))
    for ours_, theirs_ in zip(mine, other, strict=True):
        torch.testing.assert_close(ours_, theirs_)


def test_it_begins_on_rings() -> None:
    layer = DeformableAttention(8, levels=2, heads=4, points=3, ratio=0.5)
    bias = layer.offsets.bias.detach().reshape(4, 2, 3, 2)
    for head, direction in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
        for step in range(3):
            wanted = torch.tensor(direction) * (step + 1.0)
            torch.testing.assert_close(bias[head, :, step], wanted.expand(2, 2), atol=1e-5, rtol=0)
    assert not layer.offsets.weight.any() and not layer.weights.weight.any()
    assert layer.value.weight.shape == (4, 8) and layer.out.weight.shape == (8, 4)
    with pytest.raises(LinvitError, match="12 channels cannot be split into 8 heads"):
        DeformableAttention(12, 1, heads=8)


def test_half_precision_keeps_its_places() -> None:
    """Under autocast the places are as exact as without."""
    torch.manual_seed(0)
    layer = DeformableAttention(16, 1, heads=2)
    shapes = [(40, 300)]
    tokens = torch.randn(1, 12000, 16)
    query, places = torch.randn(1, 50, 16), torch.rand(50, 1, 2)
    exact = layer(query, places, tokens, shapes)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = layer(query, places, tokens, shapes)
    assert (coarse.float() - exact).norm() < 0.02 * exact.norm()
