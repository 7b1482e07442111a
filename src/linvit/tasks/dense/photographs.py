"""Photographs that nobody annotated, for stages that learn from the original alone: nothing is known to be on them."""

from dataclasses import dataclass, replace

import torch

from linvit.images import is_image
from linvit.models.dense import IGNORED
from linvit.tasks.dense.files import Files, join
from linvit.tasks.dense.pixels import read_photograph
from linvit.tasks.dense.samples import Row, Sample, Samples


@dataclass(eq=False)
class Photographs(Samples):
    """Images without annotations. To segment, no pixel is judged; to detect, there is no object."""

    task: str = "segment"
    with_masks: bool = False
    labelled = False

    def read(self, index: int) -> Sample:
        row = self.rows[index]
        image = read_photograph(self.files, row.image)
        if self.task == "segment":
            return Sample(image, row.id, torch.full(image.shape[1:], IGNORED))
        none, flags = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        found = Sample(image, row.id, none, torch.zeros(0, 4), flags, flags, torch.zeros(0))
        if self.with_masks:
            found.masks = torch.zeros(0, *image.shape[1:], dtype=torch.uint8)
        return found

    def relabelled(self, categories: tuple[str, ...], places: list[int]) -> "Photographs":
        return replace(self, categories=categories)


def photographs_in(files: Files, base: str, title: str, task: str, masks: bool) -> Photographs | None:
    """The images of a folder that holds nothing but these and perhaps other files; none where it has folders."""
    here = files.listing(base)
    names = sorted(name for name in here.files if is_image(name))
    if here.folders or not names:
        return None
    rows = [Row(join(base, name), number) for number, name in enumerate(names)]
    return Photographs(title, (), files, rows, task=task, with_masks=masks)
