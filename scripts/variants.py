"""What changes of a recipe did: the runs of stores by candidate, epochs and the settings in which they differ from it.

    python -m scripts.variants benchmarks/stores/{recovery,fast-variants}.tar.xz --recipe fast --seeds 0,1,2

Means over seeds of top-1 and of the KL divergence from the teacher. With the same `--seeds`, rows are of paired runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linvit.comparison.results import Run
from linvit.comparison.statistics.estimates import estimate
from linvit.comparison.statistics.reading import read
from linvit.training.recipes import recipe

# How long, at which size, how evaluated and which seed: not what a variant is about.
ASIDE = {"seed", "epochs", "warmup_epochs", "eval_epochs", "test_crop", "input_size", "compile", "ema_ramp", "stages"}


def changes(config: Mapping[str, Any], task: str = "classify") -> str:
    """The settings of a run that are not its recipe's, as `--set` takes them; stages in shares of the whole."""
    usual = recipe(config["recipe"], task=task).to_dict()
    found = [
        f"{key}={config[key]}" for key in usual if key in config and key not in ASIDE and config[key] != usual[key]
    ]
    stages = {stage["name"]: stage for stage in config["stages"]}
    whole, of = (sum(stage["epochs"] for stage in one["stages"]) or 1 for one in (config, usual))
    for stage in usual["stages"]:
        name, given = stage["name"], stages.get(stage["name"], {"epochs": 0})
        share = round(given["epochs"] / whole * of, 3)
        found += [f"stages.{name}.epochs={share:g}"] if share != stage["epochs"] else []
        found += [
            f"stages.{name}.{key}={value}"
            for key, value in given.items()
            if key != "epochs" and value != stage.get(key)
        ]
    return " ".join(found)


def table(runs: Sequence[Run], name: str, seeds: set[int] | None = None) -> str:
    """A row for each candidate, number of epochs and set of changes."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        config = run.identity.config
        distilled = run.conversion is not None and run.conversion.kl is not None
        if distilled and config["recipe"] == name and (seeds is None or run.seed in seeds):
            groups.setdefault((run.label.candidate, round(config["epochs"]), changes(config)), []).append(run)
    lines = ["| candidate | epochs | changed | seeds | top-1, % | KL |", "|---|---:|---|---:|---:|---:|"]
    for (candidate, epochs, changed), found in sorted(groups.items()):
        top1 = estimate([run.score for run in found]).mean
        kl = estimate([run.conversion.kl for run in found if run.conversion and run.conversion.kl is not None]).mean
        what = f"`{changed}`" if changed else ""
        lines.append(f"| `{candidate}` | {epochs} | {what} | {len(found)} | {top1:.2f} | {kl:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("stores", type=Path, nargs="+")
    asked.add_argument("--recipe", default="fast")
    asked.add_argument("--seeds", help="only these, with commas between")
    given = asked.parse_args()
    chosen = {int(seed) for seed in given.seeds.split(",")} if given.seeds else None
    print(table(read(given.stores).runs, given.recipe, chosen))
