"""What a paper printed: a line, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Printed:
    """One line of a paper's table. Cells are the printed text, empty where the paper prints none.

    A printed cell must agree with our count unless `differs` names it; `note` says why, and anything else to know.
    """

    label: str
    model: str = ""  # what timm.create_model builds; empty for what is not built here
    params: str = ""  # in millions
    macs: str = ""  # in billions
    accuracy: str = ""  # top-1 in percent, or another metric by its name
    note: str = ""
    differs: tuple[str, ...] = ()  # of params and macs
    left_out: str = ""  # the paper counts parameters without these: mechanisms or batch_norm
    options: Mapping[str, Any] = field(default_factory=dict)  # for timm.create_model
    size: tuple[int, int, int] = (3, 224, 224)  # channels, height, width


@dataclass(frozen=True)
class Section:
    title: str
    rows: tuple[Printed, ...]


def section(title: str, *rows: Printed) -> Section:
    return Section(title, rows)


@dataclass(frozen=True)
class Table:
    title: str
    remark: str  # what holds for every row
    sections: tuple[Section, ...]
    convention: str = "macs"
    tolerance: float = 0.01  # of MACs, relative; a count that rounds to the printed digits agrees as well

    @property
    def rows(self) -> list[Printed]:
        return [row for section in self.sections for row in section.rows]
