"""docs/auto.md from results of `bench auto`: what the plan `auto` converts of timm's families, and what that buys.

    python -m scripts.auto

`make docs` does it as well.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from linvit.measurement.record import read_result
from scripts.edge import RESULTS, markdown

PAGE = Path(__file__).parent.parent / "docs" / "auto.md"
HEAD = """# What the plan `auto` buys

Of 30 of timm's families, small models with random weights: the layers that `auto` converts, the multiply-accumulates of
all attention layers before and after, and the whole model's speed beside its original, by turns. N > 2d counts the
layers of softmax with more keys than two heads are wide, where linear attention should pay by its MACs.

    benchmarks/measure_auto.sh FOLDER NAME

A model is never slower for `auto`: what does not pay stays, and below each table stands why. A relative bias is not
given up unless it is named: `--drop relative_bias`, or `drop=("relative_bias",)` in Python. On a CPU it is one image,
one thread and eager PyTorch that [keeps its memory](deployment.md).
"""


def page(results: list[dict[str, Any]]) -> str:
    return "\n\n".join([HEAD.rstrip(), *(section(result) for result in results)]) + "\n"


def section(result: dict[str, Any]) -> str:
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: (names.index(row["model"]), int(row["resolution"])))
    title = ", without ".join([result["environment"]["hardware"], *result.get("drop", ())])
    parts = [f"## {title}", markdown(table(rows))]
    left = [line for row in rows if row["status"] == "ok" for line in misses(row)]
    failed = [f"- `{row['model']}` at {row['resolution']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    done = {(row["model"], row["resolution"]) for row in rows}
    for size in sorted({row["resolution"] for row in rows}):
        later = [f"`{name}`" for name in names if (name, size) not in done]
        failed += [f"- still to be measured at {size}: {', '.join(later)}"] if later else []
    for title, lines in (("Left although N > 2d:", left), ("Not measured:", failed)):
        parts += [title, "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each model and size, the model's name on its first."""
    lines = [["model", "pixels", "layers", "N > 2d", "`auto` converts", "attention, GMACs", "ms", "speed"]]
    lines.append(["---", *["---:"] * 3, "---", *["---:"] * 3])
    for model, group in groupby((row for row in rows if row["status"] == "ok"), key=lambda row: str(row["model"])):
        for place, row in enumerate(group):
            plan = ", ".join(f"{count} `{mechanism}`" for mechanism, count in row["plan"].items()) or "nothing"
            macs = f"{row['macs'] / 1e9:.3g} → {row['macs_converted'] / 1e9:.3g}"
            numbers = [
                f"{row['layers']}",
                f"{row['large']}",
                plan,
                macs,
                f"{row['ms']:,.3g}" if row["ms"] < 1000 else f"{row['ms']:,.0f}",
                f"{row['ratio']:.2f}×",
            ]
            lines.append(["" if place else f"`{model}`", str(row["resolution"]), *numbers])
    return lines


def misses(row: dict[str, Any]) -> list[str]:
    return [f"- `{row['model']}` at {row['resolution']}: {shortened(reason)}" for reason in row["missed"]]


def shortened(reason: str) -> str:
    """`layers 2, 3, 4: …` as `layers 2–4: …`."""
    found = re.match(r"layers ([\d, ]+):", reason)
    if found is None:
        return reason
    numbers = [int(number) for number in found[1].split(", ")]
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    told = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{'layers' if len(numbers) > 1 else 'layer'} {told}:{reason[found.end() :]}"


def main() -> None:
    results = [read_result(path) for path in sorted(RESULTS.glob("auto-*.json"))]
    if results:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
