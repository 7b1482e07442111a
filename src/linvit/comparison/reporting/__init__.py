"""The report of a comparison: read the stores, work out what they say, write it as a page, as Markdown or as CSV."""

from linvit.comparison.reporting.answer import Contents, gather
from linvit.comparison.reporting.page import render
from linvit.comparison.reporting.text import markdown, spreadsheet

__all__ = ["Contents", "gather", "markdown", "render", "spreadsheet"]
