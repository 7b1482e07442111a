"""The papers' own numbers beside ours, where both speak of the same thing.

Two things are comparable between a paper's ImageNet and our data: how a mechanism changes the accuracy of the model it
replaces softmax in (a difference, not a level), and in which order the mechanisms of the Fair Comparison come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

from linvit.comparison.reporting.wording import listing, minus, short
from linvit.comparison.statistics.estimates import kendall
from linvit.comparison.statistics.rows import CandidateRow, Setting, paired
from linvit.measurement.published import BY_MOBILE, TABLES, Printed

# The mechanism, and whether with LPI, that a row of the Fair Comparison speaks of.
FAIR = {
    "SA": ("softmax", False),
    "LA": ("linformer", False),
    "EA": ("efficient", False),
    "PA": ("performer", False),
    "AA": ("fastformer", False),
    "XCA": ("xca", False),
    "Swin": ("window", False),
    "LPI": ("xca", True),
}
MIXA_NOTE = "22 % faster on an Apple M1; the loss is printed as ~0.1 %."
MIXA = ("MixA", "mixa", "DeiT-T, abstract", "softmax", -0.1, MIXA_NOTE)
FAMILIES = {"mobile": "Mobi-", "castling": "Castling-"}


@dataclass(frozen=True)
class PaperClaim:
    """A paper's difference in top-1 on ImageNet, and ours to the same baseline on our data."""

    paper: str
    mechanism: str
    model: str
    against: str
    theirs: float
    ours: CandidateRow
    difference: float  # ours, in points
    interval: tuple[float, float] | None
    note: str = ""


@dataclass(frozen=True)
class RankedPair:
    """A mechanism in the Fair Comparison's table and in ours."""

    label: str
    theirs: Printed
    row: CandidateRow
    their_rank: int
    our_rank: int


@dataclass(frozen=True)
class Ranking:
    """The Fair Comparison's order at one patch size beside ours."""

    section: str
    patch: int  # ours
    places: tuple[RankedPair, ...]
    ranks: tuple[float, float] | None  # Kendall's tau, and its p-value
    by_seed: tuple[float, ...]  # tau of each seed on its own
    agreeing: int  # pairs that our runs tell apart, in their order
    contrary: tuple[tuple[str, str], ...]  # pairs that our runs tell apart, against their order; our better one first

    def lines(self) -> list[list[str]]:
        """In their order: candidate, their name, top-1 and rank, our top-1 and rank, parameters and MACs of both."""
        return [
            [place.row.name, place.label, place.theirs.accuracy, str(place.their_rank)]
            + [f"{place.row.score.mean:.2f}", str(place.our_rank), place.theirs.params, place.theirs.macs]
            + [short(count) for count in (place.row.first.model.parameters, place.row.first.model.macs)]
            for place in sorted(self.places, key=lambda place: place.their_rank)
        ]

    def verdict(self) -> str:
        """Whether the orders agree, and how sure that is."""
        if self.ranks is None:
            return "Too few mechanisms are shared to compare the order."
        text = f"Kendall's τ = {minus(f'{self.ranks[0]:.2f}')} over {len(self.places)} mechanisms"
        text += f" (p = {self.ranks[1]:.2g}"
        if len(self.by_seed) > 1:
            ends = dict.fromkeys(minus(f"{tau:.2f}") for tau in (min(self.by_seed), max(self.by_seed)))
            text += f"; seed by seed {' to '.join(ends)}"
        pairs, told = comb(len(self.places), 2), self.agreeing + len(self.contrary)
        text += f"). Of {pairs} pairs our runs tell {told} apart, each by its own paired 95 % interval:"
        text += f" {self.agreeing} in the paper's order, {len(self.contrary)} against it"
        against = listing([f"{better} over {worse}" for better, worse in self.contrary])
        return f"{text} ({against})." if against else f"{text}."


def claims(rows: Sequence[CandidateRow]) -> list[PaperClaim]:
    """What the papers say a mechanism changes of a classifier, where both it and what it is compared with are among the
    rows."""
    if not all(row.first.by_image for row in rows):
        return []
    said = [MIXA]
    for table, prefix in FAMILIES.items():
        for base, row in pairwise(TABLES[table].sections[0].rows):
            change = top1_change(base, row)
            # what Mobile-Attention prints of Castling is not Castling's own claim
            if change is not None and row.label.startswith(prefix) and row.note != BY_MOBILE:
                said.append((TABLES[table].title, table, base.label, "softmax", change, row.note))
    printed = TABLES["qtvit"].sections[0].rows
    for row, base in zip(printed[:6], printed[6:12], strict=True):
        said.append((TABLES["qtvit"].title, "qt", base.label, "relu_linear", top1_change(base, row) or 0.0, row.note))
    found = []
    for paper, mechanism, model, against, theirs, note in said:
        ours, rival = nearest(mechanism, rows), next((row for row in rows if row.label.candidate == against), None)
        if ours is not None and rival is not None:
            delta = paired(ours, rival)
            mean = delta.mean if delta else ours.score.mean - rival.score.mean
            ends = delta.interval if delta else None
            found.append(PaperClaim(paper, mechanism, model, against, theirs, ours, mean, ends, note))
    return found


def top1_change(base: Printed, row: Printed) -> float | None:
    """In points; None where the paper prints no accuracy."""
    try:
        return round(float(row.accuracy) - float(base.accuracy), 2)
    except ValueError:
        return None


def nearest(mechanism: str, rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """The candidate that is most like the paper's, whatever it scored: MixA keeps layers that an analysis names; else
    the one with the most seeds, and with the fewest options of its own."""
    fitting = {row.label.candidate: row for row in rows if row.label.mechanism == mechanism}
    best = max(
        fitting, key=lambda name: ("layers=measured" in name, len(fitting[name].runs), -len(name), name), default=""
    )
    return fitting.get(best)


def rankings(setting: Setting) -> list[Ranking]:
    """The Fair Comparison's tables beside our rows of each place; its finer patches beside our finest."""
    if not setting.by_image:
        return []
    places = sorted(setting.places(teachers=False), key=lambda rows: (rows[0].patch, -rows[0].label.size))
    made = []
    for index, rows in enumerate(places):
        section = TABLES["fair"].sections[min(index, 1)]
        pairs = [(printed, found) for printed in section.rows if (found := same(printed, rows)) is not None]
        if len(pairs) >= 3:
            made.append(rank_pairs(section.title, pairs))
    return made


def rank_pairs(section: str, pairs: Sequence[tuple[Printed, CandidateRow]]) -> Ranking:
    theirs, ours = [float(printed.accuracy) for printed, _ in pairs], [row.score.mean for _, row in pairs]
    ranks_of = ([1 + sum(a > b for a in values) for b in values] for values in (theirs, ours))
    ranked = zip(pairs, *ranks_of, strict=True)
    places = [RankedPair(printed.label, printed, row, *ranks) for (printed, row), *ranks in ranked]
    tops = [{run.seed: run.score for run in row.runs} for _, row in pairs]
    seeds = set.intersection(*(set(top1) for top1 in tops))
    alone = [kendall(theirs, [top1[seed] for top1 in tops]) for seed in sorted(seeds)]
    agreeing, contrary = 0, []
    for a, b in combinations(places, 2):
        found = paired(a.row, b.row)
        if found is None or not found.clear or a.their_rank == b.their_rank:
            continue
        if (found.mean > 0) == (a.their_rank < b.their_rank):
            agreeing += 1
        else:
            contrary.append((a.row.name, b.row.name) if found.mean > 0 else (b.row.name, a.row.name))
    by_seed = tuple(found[0] for found in alone if found is not None)
    patch, ranks = pairs[0][1].patch, kendall(theirs, ours)
    return Ranking(section, patch, tuple(places), ranks, by_seed, agreeing, tuple(contrary))


def same(printed: Printed, rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """Our row of the mechanism that a row of the Fair Comparison speaks of; its own variant before another."""
    wanted = FAIR[printed.label.rpartition("-")[0]]
    fitting = [row for row in rows if (row.label.mechanism, "lpi=true" in row.label.candidate) == wanted]
    return max(fitting, key=lambda row: "variant=fair" in row.label.candidate, default=None)
