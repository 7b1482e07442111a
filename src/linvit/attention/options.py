"""The types of mechanisms' options. A constructor annotates its keyword arguments with them, or with a `Literal` of
words, and `check_options` reads the annotations."""

from typing import Annotated

from linvit.codec import Range

Count = Annotated[int, Range(1)]
ConvWidth = Annotated[int, Range(1, 255, odd=True)]
Eps = Annotated[float, Range(0, 1)]
Number = Annotated[float, Range()]

__all__ = ["ConvWidth", "Count", "Eps", "Number", "Range"]
