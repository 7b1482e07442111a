"""What the papers printed: one file per paper, each cell as it stands there."""

from linvit.measurement.published import castling, fair, mobile, qtvit
from linvit.measurement.published.row import Row, Section, Table

TABLES: dict[str, Table] = {
    "fair": fair.TABLE,
    "qtvit": qtvit.TABLE,
    "mobile": mobile.TABLE,
    "castling": castling.TABLE,
}

__all__ = ["TABLES", "Row", "Section", "Table"]
