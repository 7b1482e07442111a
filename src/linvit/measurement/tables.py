"""Our parameters and MACs beside the published ones, cell by cell."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from linvit.attention import Mechanism
from linvit.measurement.macs import count_macs, count_parameters
from linvit.measurement.published import Printed, Table
from linvit.models.dense import HEADS, DenseModel

LEFT_OUT: dict[str, type[nn.Module]] = {"mechanisms": Mechanism, "batch_norm": _BatchNorm}


@dataclass(frozen=True)
class Cell:
    """A published number (as printed) and ours, in the same unit."""

    published: str
    ours: float | None
    agrees: bool  # ours, counted the paper's way, is the printed number
    must: bool  # it has to agree

    @property
    def error(self) -> float | None:
        """How far ours is from the printed number, relative to that."""
        if not self.published or self.ours is None:
            return None
        return self.ours / float(self.published) - 1

    @property
    def wrong(self) -> bool:
        return self.must and not self.agrees


@dataclass(frozen=True)
class TableRow:
    printed: Printed
    params: Cell
    macs: Cell
    failure: str = ""  # why the model could not be built or counted

    @property
    def wrong(self) -> bool:
        return bool(self.failure) or self.params.wrong or self.macs.wrong


def compare_table(table: Table) -> Iterator[TableRow]:
    """Every row of the table, counted one after the other."""
    for printed in table.rows:
        yield compare_row(printed, table)


def compare_row(printed: Printed, table: Table) -> TableRow:
    def not_counted(failure: str = "") -> TableRow:
        params, macs = (Cell(cell, None, agrees=False, must=bool(failure)) for cell in (printed.params, printed.macs))
        return TableRow(printed, params, macs, failure)

    if not printed.model or lacks_extra(printed.model):
        return not_counted()
    try:
        with warnings.catch_warnings(), torch.device("meta"):  # where 246 M parameters cost nothing
            warnings.simplefilter("ignore")
            model = timm.create_model(printed.model, **printed.options)
        ours = count_parameters(model) / 1e6
        their_way = count_parameters(model, without=LEFT_OUT.get(printed.left_out)) / 1e6
        found = isinstance(model, DenseModel) and model.task == "detect"  # what its head computes depends on the image
        macs = None if found else count_macs(model, printed.size, table.convention) / 1e9
    except Exception as error:  # a table is printed whole, whatever is wrong with one of its rows
        return not_counted(f"{printed.model}: {str(error).partition(chr(10))[0] or type(error).__name__}")

    def cell(name: str, published: str, ours: float | None, agrees: bool) -> Cell:
        return Cell(published, ours, agrees, must=bool(published) and name not in printed.differs)

    return TableRow(
        printed,
        cell("params", printed.params, ours, is_printed(their_way, printed.params)),
        cell("macs", printed.macs, macs, macs is not None and is_near(macs, printed.macs, table.tolerance)),
    )


def lacks_extra(model: str) -> bool:
    """Whether the model comes from a package that is not installed."""
    head = HEADS.get(model)
    return head is not None and bool(head.extra) and find_spec(head.extra) is None


def is_printed(value: float, printed: str) -> bool:
    """Whether `value` rounds to what is printed, to half a unit of the last digit; true where nothing is."""
    return not printed or abs(value - float(printed)) <= 0.5 * 10.0 ** -len(printed.partition(".")[2])


def is_near(value: float, printed: str, tolerance: float) -> bool:
    return is_printed(value, printed) or abs(value / float(printed) - 1) <= tolerance
