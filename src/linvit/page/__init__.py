"""A page on this machine that shows what the attention of two models does to a picture: `linvit serve`.

    catalogue   which models and plans may be opened, and nothing else
    sides       a model by a plan at a size: what it says of a picture, its maps, its speed
    pictures    pictures that were sent, within limits, and those that are always there
    cache       bounded memory; nothing is written to disk
    guard       which requests are answered at all
    app         the addresses, and the server

The page itself is in `page_files`, in the report's look: plain files, no build, nothing from elsewhere.
"""

from linvit.page.app import Page, make_app, run_server

__all__ = ["Page", "make_app", "run_server"]
