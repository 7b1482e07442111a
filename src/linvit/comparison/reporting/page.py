"""The page: one file with its style, its script and its data, which asks the network for nothing.

Everything that comes from a file goes through `escape`, or as JSON into a script element that is never run; the script
makes elements from it and sets their text. The page's own policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from linvit.comparison.reporting.caveats import caveats, hardware, inferred, method
from linvit.comparison.reporting.contents import Contents
from linvit.comparison.reporting.papers import papers_html
from linvit.comparison.reporting.payload import payload
from linvit.comparison.reporting.wording import listing
from linvit.comparison.results import Failure
from linvit.comparison.statistics.rows import BASELINE
from linvit.version import __version__

SCRIPTS = ("base", "marks", "plot", "points", "pareto", "growth", "learning", "picks", "table", "runs", "main")


def render(contents: Contents) -> str:
    """The whole page."""
    script = "(() => {\n'use strict';\n" + "\n".join(own(f"{name}.js") for name in SCRIPTS) + "})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    results, settings = contents.results, contents.settings
    failed = bool(results.failures)
    parts = {
        "script_hash": f"sha256-{digest}",
        "version": escape(__version__),
        "title": escape(settings[0].title if settings else "Comparison"),
        "style": own("page.css"),
        "script": script,
        "data": embedded(payload(results, settings, contents.answer)),
        "answer": answer_html(contents),
        "facts": escape(facts(contents)),
        "papers": papers_html(settings),
        "method": method_html(contents),
        "failures": failures_html(results.failures) if failed else "",
        "failures_link": '<a href="#failures">Failures</a>' if failed else "",
        "footer": escape(footer(contents)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], own("page.html"))


def own(name: str) -> str:
    return (resources.files(__package__) / "page_files" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON that no HTML parser sees a tag in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def answer_html(contents: Contents) -> str:
    """The sentences, candidates' names set off."""
    names = sorted(
        {row.name for setting in contents.settings for row in setting.rows} - {BASELINE}, key=len, reverse=True
    )
    pattern = "|".join(re.escape(escape(name)) for name in names)
    said = [escape(sentence) for sentence in contents.answer.sentences]
    if pattern:
        said = [re.sub(rf"(?<![\w:])({pattern})(?![\w:])", r"<b>\1</b>", sentence) for sentence in said]
    return "".join(f"<p>{sentence}</p>" for sentence in said)


def facts(contents: Contents) -> str:
    runs = contents.results.runs
    candidates, seeds = {run.label.candidate for run in runs}, {run.seed for run in runs}
    chips = sorted({ladder.chip for s in contents.settings for row in s.rows for ladder in row.ladders})
    words = [f"{len(runs)} runs", f"{len(candidates)} candidates", f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"]
    words += [f"data {name}" for name in sorted({run.data.name for run in runs})]
    words += [f"timed on {listing(chips)}"] if chips else []
    words += [f"{len(contents.results.failures)} failed"] if contents.results.failures else []
    return " · ".join(words)


def footer(contents: Contents) -> str:
    when = datetime.now(UTC).strftime("%d %B %Y")
    stores = listing(contents.results.stores)
    return f"Made by linvit {__version__} on {when} from {stores}. Every number comes from a result file there."


def method_html(contents: Contents) -> str:
    results = contents.results
    made = "".join(
        f"<dt>{escape(name)}</dt><dd>{'<br>'.join(escape(value) for value in values)}</dd>"
        for name, values in hardware(results).items()
    )
    ours = inferred(sorted({run.label.mechanism for run in results.runs}))
    said = [f"<b>{escape(names)}</b>: {escape(sentence)}" for names, sentence in ours]
    return (
        '<div class="columns"><div>'
        f"<h3>Method</h3>{bullets(escape(line) for line in method(contents.settings))}"
        f"<h3>Caveats</h3>{bullets(escape(line) for line in caveats(results, contents.settings))}</div><div>"
        f"<h3>Made with</h3><dl>{made}</dl>"
        + (f"<h3>Inferred, where a paper is silent</h3>{bullets(said)}" if said else "")
        + "</div></div>"
    )


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def failures_html(failures: Sequence[Failure]) -> str:
    blocks = []
    for failure in failures:
        label, trace = failure.label, failure.traceback
        known = {name: getattr(label, name) for name in ("patch", "size", "seed")}
        words = [f"{name} {value}" for name, value in known.items() if value is not None]
        words.append(f"attempt {failure.attempt}")
        more = f"<details><summary>Traceback</summary><pre>{escape(trace)}</pre></details>" if trace else ""
        blocks.append(
            f'<div class="failure"><p><b>{escape(label.candidate)}</b> {escape(", ".join(words))}</p>'
            f'<p class="error">{escape(failure.error)}</p>{more}</div>'
        )
    return (
        '<section id="failures" aria-labelledby="h-failures"><h2 id="h-failures">What failed</h2>'
        "<p>These are missing above. <code>linvit compare … --retry</code> tries them again.</p>"
        f"{''.join(blocks)}</section>"
    )
