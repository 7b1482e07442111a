"""The report of a comparison: read the stores, work out what they say, write it as a page, as Markdown or as CSV."""

from linvit.comparison.report.contents import Contents, gather
from linvit.comparison.report.markdown import markdown
from linvit.comparison.report.page import render
from linvit.comparison.report.spreadsheet import spreadsheet

__all__ = ["Contents", "gather", "markdown", "render", "spreadsheet"]
