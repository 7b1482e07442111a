"""One fair comparison: what is compared, who does it and where, what comes of it, and the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.comparison.description.spec import Comparison, Measure

if TYPE_CHECKING:
    from linvit.comparison.reporting import Contents
    from linvit.comparison.scheduling.scheduler import Summary, Watch

__all__ = ["Comparison", "Measure", "compare", "report"]
PAGE = "report.html"  # the report in a store


def compare(
    what: str | Comparison,
    store: str | Path,
    *,
    engine: str = "auto",
    per_gpu: int = 1,
    address: str = "",
    cpus: int | None = None,
    retry: bool = False,
    watch: "Watch" = lambda job, record: None,
    **changes: Any,
) -> "Summary":
    """Do what a comparison, a preset or a TOML file asks for, with `changes` of its fields, and write the report into
    the store. What is finished there is not repeated; an empty `what` goes on with what the store was asked before.

        linvit.comparison.compare("digits", "runs/digits", plans=("softmax", "stella"), seeds=(0,))
    """
    from linvit.comparison.description.request import read_request
    from linvit.comparison.scheduling.places.choice import choose
    from linvit.comparison.scheduling.store import Store

    work = choose(engine, per_gpu=per_gpu, address=address, cpus=cpus)
    found = Store(store)
    request = read_request(what, changes, found.comparisons())
    for comparison in request.comparisons:
        found.ask(comparison)
    summary = work(request.jobs, found, watch=watch, retry=retry)
    if summary.anything:
        report(store, found.folder / PAGE)
    return summary


def report(stores: str | Path | Sequence[str | Path], output: str | Path | None = None) -> "Contents":
    """What stores, their folders or archives, say together; with `output`, written there as one page."""
    from linvit.comparison.reporting import gather, render
    from linvit.files import write

    contents = gather([stores] if isinstance(stores, str | Path) else stores)
    if output is not None:
        write(Path(output), render(contents))
    return contents
