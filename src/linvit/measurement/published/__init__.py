"""What the papers printed: one file per paper, each cell as it stands there."""

from linvit.measurement.published import castling, fair, mobile, qtvit
from linvit.measurement.published.table import Printed, Section, Table

TABLES: dict[str, Table] = {
    "fair": fair.TABLE,
    "qtvit": qtvit.TABLE,
    "mobile": mobile.TABLE,
    "castling": castling.TABLE,
}

__all__ = ["TABLES", "Printed", "Section", "Table"]
