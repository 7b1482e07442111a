"""MACs of detectors and segmenters by part: backbone, of it the attention, neck and head.

Heads that choose boxes cannot run without data, so one image is really run. A model of R-CNN's kind is counted with as
many proposals and detections as it ever has; choosing and cutting out boxes counts nothing.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import register_flop_formula
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork

from linvit.attention import Mechanism
from linvit.measurement.macs import Ledger
from linvit.models.dense import DenseModel

LEAST_SIDE = 16.0  # pixels of a drawn proposal

register_flop_formula([torch.ops.torchvision.roi_align, torch.ops.torchvision.nms])(lambda *shapes, **kwargs: 0)


def macs_of_parts(model: DenseModel, size: tuple[int, int]) -> dict[str, int]:
    """MACs of one image of this height and width: `backbone`, of which `attention`, `neck`, `head`, and the `whole`.
    Attention is what happens between the projections."""
    twin = as_busy_as_can_be(model, size)
    ledger = Ledger()
    plain = PlainAttention(ledger)
    found: dict[str, int] = {}

    def total() -> int:
        return ledger.attention + ledger.products - ledger.replaced

    def attention() -> int:
        return ledger.attention + plain.macs

    def enter(part: str, *_: Any) -> None:
        found[part] = found.get(part, 0) - total()
        if part == "backbone":
            found["attention"] = -attention()

    def leave(part: str, *_: Any) -> None:
        found[part] += total()
        if part == "backbone":
            found["attention"] += attention()

    for part, modules in twin.parts().items():
        for module in modules:
            module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            module.register_forward_hook(lambda *_, part=part: leave(part))
    image = torch.zeros(1, 3, *size, device=next(model.parameters()).device)
    # the plain form of SDPA is matrix products; what its fused forms count depends on the version of torch
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), ledger.counting(), plain:
        twin(image)
    return {**found, "whole": total()}


class PlainAttention(TorchFunctionMode):
    """Counts the attention of layers that were not converted."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.macs = ledger, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.ledger.products
        found = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and not self.ledger.depth:
            self.macs += self.ledger.products - before
        return found


def as_busy_as_can_be(model: DenseModel, size: tuple[int, int]) -> DenseModel:
    """A copy for counting, in evaluation mode and on the plain references, with all the boxes that it can have."""
    twin = copy.deepcopy(model).float().eval()
    for module in twin.modules():
        if isinstance(module, Mechanism):
            module.impl = "reference"
        elif isinstance(module, RegionProposalNetwork):
            module.register_forward_hook(lambda network, args, out: ([drawn_boxes(network, size)], out[1]))
        elif isinstance(module, RoIHeads):
            module.score_thresh, module.nms_thresh = -1.0, 1.0
    return twin


def drawn_boxes(network: Any, size: tuple[int, int]) -> Tensor:
    """As many proposals as a network gives at most."""
    device, generator = next(network.parameters()).device, torch.Generator().manual_seed(0)
    starts, spans = torch.rand(2, network.post_nms_top_n(), 2, generator=generator)
    sides = torch.tensor([size[1], size[0]]) - LEAST_SIDE
    low = starts * sides
    return torch.cat([low, low + LEAST_SIDE + spans * (sides - low)], dim=1).to(device)
