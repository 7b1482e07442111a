"""The page: one file with its style, its script and its data, which asks the network for nothing.

Everything that comes from a file goes through `escape`, or as JSON into a script element that is never run; the script
makes elements from it and sets their text. The page's own policy lets no other script run.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from itertools import groupby
from typing import Any

from linvit.comparison.reporting.answer import Contents, main_rows
from linvit.comparison.reporting.caveats import caveats, hardware, inferred, method
from linvit.comparison.reporting.payload import facts, payload, told
from linvit.comparison.reporting.published import PaperClaim, Ranking, claims, rankings
from linvit.comparison.reporting.wording import change, listing, minus
from linvit.comparison.results import Failure
from linvit.comparison.statistics.rows import Setting
from linvit.version import __version__

SCRIPTS = ("base", "marks", "plot", "points", "pareto", "growth", "learning", "picks", "table", "runs", "main")
SOURCE = "Every number comes from a result file there."


def render(contents: Contents) -> str:
    """The whole page."""
    script = "(() => {\n'use strict';\n" + "\n".join(own(f"{name}.js") for name in SCRIPTS) + "})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    results, settings = contents.results, contents.settings
    today, stores = datetime.now(UTC).strftime("%d %B %Y"), listing(results.stores)
    parts = {
        "script_hash": f"sha256-{digest}",
        "version": escape(__version__),
        "title": escape(settings[0].title if settings else "Comparison"),
        "style": own("page.css"),
        "script": script,
        "data": embedded(payload(contents)),
        "answer": answer_html(contents),
        "facts": escape(facts(contents, settings[0])) if settings else "",
        "papers": papers_html(settings),
        "method": method_html(contents),
        "failures": failures_html(results.failures) if results.failures else "",
        "failures_link": '<a href="#failures">Failures</a>' if results.failures else "",
        "footer": escape(f"Made by linvit {__version__} on {today} from {stores}. {SOURCE}"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], own("page.html"))


def own(name: str) -> str:
    return (resources.files(__package__) / "page_files" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON that no HTML parser sees a tag in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def answer_html(contents: Contents) -> str:
    """The sentences, candidates' names set off, the first as the headline."""
    said = told(contents, 0)
    texts = ["".join(f"<b>{escape(p)}</b>" if i % 2 else escape(p) for i, p in enumerate(parts)) for parts in said]
    return f'<h1 id="title">{texts[0]}</h1>' + "".join(f"<p>{text}</p>" for text in texts[1:])


def method_html(contents: Contents) -> str:
    made = "".join(
        f"<dt>{escape(name)}</dt><dd>{'<br>'.join(map(escape, values))}</dd>"
        for name, values in hardware(contents.results).items()
    )
    ours = inferred(sorted({run.label.mechanism for run in contents.results.runs}))
    said = [f"<b>{escape(names)}</b>: {escape(sentence)}" for names, sentence in ours]
    return (
        f'<div class="columns"><div><h3>Method</h3>{bullets(map(escape, method(contents.settings)))}'
        f"<h3>Caveats</h3>{bullets(map(escape, caveats(contents.results, contents.settings)))}</div>"
        f"<div><details><summary>Made with</summary><dl>{made}</dl></details>"
        + (f"<h3>Inferred, where a paper is silent</h3>{bullets(said)}" if said else "")
        + "</div></div>"
    )


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def failures_html(failures: Sequence[Failure]) -> str:
    blocks = []
    for failure in failures:
        known = [(name, getattr(failure.label, name)) for name in ("patch", "size", "seed")]
        known.append(("attempt", failure.attempt))
        words = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        trace = escape(failure.traceback)
        more = f"<details><summary>Traceback</summary><pre>{trace}</pre></details>" if trace else ""
        blocks.append(
            f'<div class="failure"><p><b>{escape(failure.label.candidate)}</b> {escape(words)}</p>'
            f'<p class="error">{escape(failure.error)}</p>{more}</div>'
        )
    return (
        '<section id="failures" aria-labelledby="h-failures"><h2 id="h-failures">What failed</h2>'
        "<p>These are missing above. <code>linvit compare … --retry</code> tries them again.</p>"
        f"{''.join(blocks)}</section>"
    )


def papers_html(settings: Sequence[Setting]) -> str:
    """The papers' numbers, marked as theirs, beside ours."""
    blocks: list[str] = []
    for setting in settings:
        body = "".join(map(ranking_html, rankings(setting))) + claims_html(claims(main_rows(setting)))
        if body:
            more = f"<details class='further'><summary>{escape(setting.title)}</summary>{body}</details>"
            blocks.append(more if blocks else body)
    if settings and not any(setting.by_image for setting in settings):
        return "<p>The papers' numbers that are kept here are of classifiers: none compares with these.</p>"
    if not blocks:
        return "<p>None of the papers' mechanisms is here together with what they compare it with.</p>"
    return (
        '<p><span class="tag">Theirs</span> are the papers\' own numbers, on ImageNet-1k with their models and recipes;'
        " ours are from the runs above. Levels do not compare. What compares is the order of mechanisms, and what a"
        " mechanism changes.</p>" + "".join(blocks)
    )


def ranking_html(ranking: Ranking) -> str:
    heads = ["Candidate", "Their name", "Their top-1", "Rank", "Our top-1", "Rank"]
    heads += ["Params, M", "GFLOPs", "Our params", "Our MACs"]
    kinds = ["", "theirs", "theirs r", "theirs r", "r", "r", "theirs r", "theirs r", "r", "r"]
    title = f"The Fair Comparison, {ranking.section.lower()}, beside our patches of {ranking.patch}"
    beside = f'<div class="beside">{table_html(heads, kinds, ranking.lines())}{slopes(ranking)}</div>'
    return f"<h3>{escape(title)}</h3><p>{escape(ranking.verdict())}</p>{beside}"


def slopes(ranking: Ranking) -> str:
    """Both orders as two columns of names. Lines that cross disagree; those that our runs tell apart are set off."""
    contrary = {name for pair in ranking.contrary for name in pair}
    step, top, left, right = 23, 34, 62, 190
    height = top + step * len(ranking.places)
    width = right + 16 + 7 * max(len(place.row.name) for place in ranking.places)
    # Equal ranks stand below each other, in their order on the other side.
    theirs = sorted(ranking.places, key=lambda place: (place.their_rank, place.our_rank))
    ours = sorted(ranking.places, key=lambda place: (place.our_rank, place.their_rank))
    lines = []
    for place in ranking.places:
        y1, y2 = (top + step * side.index(place) for side in (theirs, ours))
        moved = "moved" if place.row.name in contrary else ""
        lines.append(
            f'<line class="{moved}" x1="{left}" y1="{y1 - 4}" x2="{right}" y2="{y2 - 4}"/>'
            f'<text x="{left - 8}" y="{y1}" text-anchor="end">{escape(place.label)}</text>'
            f'<text class="ours" x="{right + 8}" y="{y2}">{escape(place.row.name)}</text>'
        )
    return (
        f'<svg class="slopes" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="Their order and ours, best first"><text x="{left - 8}" y="12" text-anchor="end">theirs</text>'
        f'<text x="{right + 8}" y="12">ours</text>{"".join(lines)}</svg>'
    )


def claims_html(claimed: Sequence[PaperClaim]) -> str:
    rows = []
    for (paper, _), found in groupby(claimed, key=lambda claim: (claim.paper, claim.mechanism)):
        first, *others = group = list(found)
        theirs = ", ".join(f"{claim.model} {minus(f'{claim.theirs:+.2g}')}" for claim in group)
        theirs += f". {first.note}" if first.note and not others else ""
        rows.append([first.ours.name, paper, theirs, first.against, change(first.difference, first.interval)])
    heads = ["Candidate", "Paper", "Their change in top-1, points", "Against", "Ours, points"]
    made = table_html(heads, ["", "theirs", "theirs wide", "", "r"], rows)
    return f"<h3>What replacing the attention changes</h3>{made}" if rows else ""


def table_html(heads: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Each column has its class."""

    def line(tag: str, end: str, cells: Sequence[str]) -> str:
        columns = zip(kinds, cells, strict=True)
        return "".join(f'<{tag} class="{kind}">{escape(text)}</{end}>' for kind, text in columns)

    head = line('th scope="col"', "th", heads)
    body = "".join(f"<tr>{line('td', 'td', row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
