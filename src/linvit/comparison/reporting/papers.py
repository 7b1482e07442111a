"""The papers' numbers on the page, marked as theirs, beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from linvit.comparison.reporting.answer import main_rows
from linvit.comparison.reporting.published import PaperClaim, Ranking, claims, rankings
from linvit.comparison.reporting.wording import interval, minus, short
from linvit.comparison.statistics.rows import Setting

Cell = str | tuple[str, str]  # what it says, escaped; or a class and that


def papers_html(settings: Sequence[Setting]) -> str:
    """The papers' numbers, marked as theirs, beside ours."""
    blocks: list[str] = []
    for setting in settings:
        made = [ranking_html(ranking) for ranking in rankings(setting)]
        claimed = claims(main_rows(setting))
        if claimed:
            made.append(claims_html(claimed))
        if made:
            body = "".join(made)
            more = f"<details class='further'><summary>{escape(setting.title)}</summary>{body}</details>"
            blocks.append(more if blocks else body)
    if not blocks:
        return "<p>None of the papers' mechanisms is here together with what they compare it with.</p>"
    explained = (
        '<p><span class="tag">Theirs</span> are the papers\' own numbers, on ImageNet-1k with their models and recipes;'
        " ours are from the runs above. Levels do not compare. What compares is the order of mechanisms, and what a"
        " mechanism changes.</p>"
    )
    return explained + "".join(blocks)


def ranking_html(ranking: Ranking) -> str:
    heads: list[Cell] = [
        *("Candidate", ("theirs", "Their name"), ("theirs r", "Their top-1"), ("theirs r", "Rank")),
        *(("r", "Our top-1"), ("r", "Rank")),
        *(("theirs r", "Params, M"), ("theirs r", "GFLOPs"), ("r", "Our params"), ("r", "Our MACs")),
    ]
    rows: list[list[Cell]] = [
        [
            escape(place.row.name),
            ("theirs", escape(place.label)),
            *(("theirs r", text) for text in (place.theirs.accuracy, str(place.their_rank))),
            *(("r", text) for text in (f"{place.row.top1.mean:.2f}", str(place.our_rank))),
            *(("theirs r", text) for text in (place.theirs.params, place.theirs.macs)),
            *(("r", short(count)) for count in (place.row.first.model.parameters, place.row.first.model.macs)),
        ]
        for place in sorted(ranking.places, key=lambda place: place.their_rank)
    ]
    title = f"The Fair Comparison, {ranking.section.lower()}, beside our patches of {ranking.patch}"
    beside = f'<div class="beside">{table_html(heads, rows)}{slopes(ranking)}</div>'
    return f"<h3>{escape(title)}</h3><p>{escape(ranking.verdict())}</p>{beside}"


def slopes(ranking: Ranking) -> str:
    """Both orders as two columns of names. Lines that cross disagree; those that our runs tell apart are set off."""
    contrary = {name for pair in ranking.contrary for name in pair}
    step, top, left, right = 23, 34, 62, 190
    height = top + step * len(ranking.places)
    # Equal ranks stand below each other, in their order on the other side.
    theirs = sorted(ranking.places, key=lambda place: (place.their_rank, place.our_rank))
    ours = sorted(ranking.places, key=lambda place: (place.our_rank, place.their_rank))
    lines = []
    for place in ranking.places:
        y1, y2 = (top + step * side.index(place) for side in (theirs, ours))
        moved = "moved" if place.row.name in contrary else ""
        name = place.row.name if len(place.row.name) < 17 else place.row.name[:15] + "…"
        lines.append(
            f'<line class="{moved}" x1="{left}" y1="{y1 - 4}" x2="{right}" y2="{y2 - 4}"/>'
            f'<text x="{left - 8}" y="{y1}" text-anchor="end">{escape(place.label)}</text>'
            f'<text class="ours" x="{right + 8}" y="{y2}">{escape(name)}</text>'
        )
    return (
        f'<svg class="slopes" width="310" height="{height}" viewBox="0 0 310 {height}" role="img"'
        f' aria-label="Their order and ours, best first"><text x="{left - 8}" y="12" text-anchor="end">theirs</text>'
        f'<text x="{right + 8}" y="12">ours</text>{"".join(lines)}</svg>'
    )


def claims_html(claimed: Sequence[PaperClaim]) -> str:
    groups: dict[tuple[str, str], list[PaperClaim]] = {}
    for claim in claimed:
        groups.setdefault((claim.paper, claim.mechanism), []).append(claim)
    heads: list[Cell] = ["Candidate", ("theirs", "Paper"), ("theirs", "Their change in top-1, points")]
    heads += ["Against", ("r", "Ours, points")]
    rows: list[list[Cell]] = []
    for (paper, _), group in groups.items():
        first = group[0]
        ours = f"{minus(f'{first.difference:+.2f}')} {interval(first.interval)}"
        theirs = ", ".join(f"{claim.model} {minus(f'{claim.theirs:+.2g}')}" for claim in group)
        theirs += f". {first.note}" if first.note and len(group) == 1 else ""
        cells: list[Cell] = [escape(first.ours.name), ("theirs", escape(paper)), ("theirs wide", escape(theirs))]
        rows.append([*cells, escape(first.against), ("r", escape(ours))])
    return f"<h3>What replacing the attention changes</h3>{table_html(heads, rows)}"


def table_html(heads: Iterable[Cell], rows: Iterable[Iterable[Cell]]) -> str:
    def cell(tag: str, content: Cell) -> str:
        kind, text = content if isinstance(content, tuple) else ("", content)
        return f'<{tag} class="{kind}">{text}</{tag.partition(" ")[0]}>'

    head = "".join(cell('th scope="col"', content) for content in heads)
    body = "".join(f"<tr>{''.join(cell('td', content) for content in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
