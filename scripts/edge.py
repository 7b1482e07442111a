"""Mobile-Attention's own table measured here, and what docs/deployment.md takes from result files of `bench edge`.

    python scripts/edge.py mobile -o FILE      its models beside their originals, in every runtime; goes on with FILE
    python scripts/edge.py docs                tables and plots of benchmarks/results/edge-*.json into the page

`make docs` does the second as well.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from linvit.figures import plot_edge
from linvit.figures.edge import ratio
from linvit.measurement.record import ResultFile, environment, read_result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "deployment.md"
KIND = "mobile edge"
RUNTIMES = ("coreml", "onnx", "openvino", "executorch")
OTHERS = "other models"
SLOWER = "rows below 1"
FIXED, LITTLE = ("mixa", "stella", "relu_linear"), 0.97  # what is below the second is told row by row
TITLES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO", "executorch": "ExecuTorch"}
ORDER = ("eager", "compiled", *TITLES)

# Title, the original and its self with Mobile-Attention, and what the poster prints of both: ms by Core ML on an
# iPhone 12, and ms on a Pixel 6.
TABLE = (
    ("DeiT-T", "deit_tiny_patch16_224", "mobile_deit_tiny", (4.5, 3.8), (66.6, 53.9)),
    ("DeiT-S", "deit_small_patch16_224", "mobile_deit_small", (9.0, 7.2), (218.2, 175.7)),
    ("DeiT-B", "deit_base_patch16_224", "mobile_deit_base", (18.2, 13.3), None),
    ("PVTv2-b0", "pvt_v2_b0", "mobile_pvt_v2_b0", (78.4, 57.3), None),
    ("PVTv2-b2", "pvt_v2_b2", "mobile_pvt_v2_b2", (101.0, 65.6), None),
    ("PVTv2-b3", "pvt_v2_b3", "mobile_pvt_v2_b3", (114.5, 89.1), None),
    ("EfficientFormerV2-S0", "efficientformerv2_s0", "mobile_efficientformerv2_s0", (0.9, 0.7), (20.8, 16.2)),
    ("EfficientFormerV2-S2", "efficientformerv2_s2", "mobile_efficientformerv2_s2", (1.6, 1.2), (57.2, 48.9)),
    ("EfficientFormerV2-L", "efficientformerv2_l", "mobile_efficientformerv2_l", (2.7, 2.2), (117.7, 97.4)),
)


def measure(path: Path, *, titles: list[str], runtimes: list[str], files: Path | None, budget: float) -> None:
    """Fill a result file: every model once to Core ML, checked by its structure, and timed beside its original."""
    head = {"kind": KIND, "version": 1, "size": [224, 224], "threads": 1}
    file = ResultFile(path, head, environment("cpu"), resume=path.exists())
    done = {(row["model"], row["runtime"]) for row in file.rows}
    wanted = [(line, runtime) for line in TABLE if line[0] in titles for runtime in runtimes]
    for (title, *names), runtime in ((line[:3], runtime) for line, runtime in wanted):
        if (title, runtime) not in done:
            for row in pair(names, runtime, files, budget):
                file.add({"model": title, **row})
            print(title, runtime, flush=True)
    file.fill(())


def pair(names: list[str], runtime: str, files: Path | None, budget: float) -> Iterator[dict[str, Any]]:
    """The rows of an original and its self with Mobile-Attention."""
    from linvit.measurement.model_speed import random_model
    from linvit.runtimes import latency
    from linvit.runtimes.exporting import picture_settings
    from linvit.runtimes.photographs import photographs
    from linvit.runtimes.verifying import prepared

    size = (224, 224)
    models = {which: random_model(name, size, {}) for which, name in zip(("original", "mobile"), names, strict=True)}
    for model in models.values():
        latency.fill_vectors(model)
    with TemporaryDirectory() as folder:
        if runtime == "coreml":
            yield from (core_ml(which, model, Path(folder)) for which, model in models.items())
            return
        images = prepared(models["original"], photographs(1), picture_settings(models["original"]), size)
        rows = [{"resolution": 224, "threads": 1, "runtime": runtime, "attention": which} for which in models]
        yield from latency.measure([rows], models, images, files or Path(folder), budget)


def core_ml(which: str, model: Any, folder: Path) -> dict[str, Any]:
    """A program in half precision, with float32 where it adds up over tokens, and what its structure says."""
    from linvit.measurement.speed import failure
    from linvit.runtimes import export

    row: dict[str, Any] = {"resolution": 224, "runtime": "coreml", "attention": which}
    try:
        done = export(model, "coreml", folder / f"{which}.mlpackage", precision="fp16", count=1)
    except Exception as error:  # one that cannot be converted must not cost the others
        return {**row, **failure(error)}
    return {**row, "status": "ok", "precision": "fp16", "file_bytes": done.bytes, **done.facts}


def mobile_table(rows: list[dict[str, Any]]) -> str:
    """Ours and theirs: every cell is original → mobile, in ms, and how many times as fast that is."""
    runtimes = [name for name in TITLES if any(row["runtime"] == name for row in rows)]
    heads = ["model", *(TITLES[name] for name in runtimes), "Core ML: operations, float32 sums", "theirs, iPhone 12"]
    lines = [[*heads, "theirs, Pixel 6"], ["---", *["---:"] * (len(runtimes) + 3)]]
    for title, _, _, phone, pixel in TABLE:
        cells = [title]
        for runtime in (*runtimes, "coreml"):
            found = {r["attention"]: r for r in rows if (r["model"], r["runtime"]) == (title, runtime)}
            if not found:
                cells.append("")
            elif any(row["status"] != "ok" for row in found.values()):
                cells.append("fails")
            elif runtime == "coreml":
                cells.append(" → ".join(f"{r['operations']}, {r['float32_sums']}" for r in found.values()))
            else:
                times = [milliseconds(row) for row in found.values()]
                cells.append(change(*times, faster=ratio(found["mobile"])))
        theirs = ["" if printed is None else change(*printed) for printed in (phone, pixel)]
        lines.append([*cells, *theirs])
    return markdown(lines)


def milliseconds(row: dict[str, Any]) -> float:
    """As the ratio is: with one thread the CPU's own."""
    return float(row["cpu_ms" if row["threads"] == 1 else "ms"]["p50"])


def change(before: float, after: float, faster: float | None = None) -> str:
    return f"{before:.3g} → {after:.3g}, {(before / after) if faster is None else faster:.2f}×"


def latency_table(result: dict[str, Any]) -> str:
    """A line for each size and runtime: the original's ms, and how many times as fast each plan is; where two numbers
    of threads were measured, both."""
    rows = result["rows"]
    plans = list(dict.fromkeys(row["attention"] for row in rows))
    lines = [["pixels", "runtime", f"{plans[0]}, ms", *plans[1:]], ["---:", "---", *["---:"] * len(plans)]]
    places = sorted({(row["resolution"], ORDER.index(row["runtime"])) for row in rows})
    for pixels, place in places:
        here = [row for row in rows if (row["resolution"], row["runtime"]) == (pixels, ORDER[place])]
        threads = sorted({row["threads"] for row in here})
        found = {(row["attention"], row["threads"]): row for row in here}
        cells = [[cell(found.get((plan, count)), plan == plans[0]) for count in threads] for plan in plans]
        lines.append([f"{pixels:,}", TITLES.get(ORDER[place], ORDER[place]), *(" / ".join(both) for both in cells)])
    return markdown(lines)


def cell(row: dict[str, Any] | None, original: bool) -> str:
    if row is None or row["status"] != "ok":
        return "–" if row is None else row["status"]
    if original:
        time = milliseconds(row)
        return f"{time:.3g}" if time < 1000 else f"{time:,.0f}"
    return "as it is" if "same_as" in row else f"{ratio(row):.2f}×" if "ratio" in row else "–"


def markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """docs/deployment.md with its tables as the result files have them: under each mark what it names, and the results
    of `bench edge` that have no mark of their own under that of the others, by their models' names."""
    text, others = PAGE.read_text(encoding="utf-8"), []
    for path in sorted(RESULTS.glob("edge-*.json")):
        result = read_result(path)
        table = mobile_table(result["rows"]) if result["kind"] == KIND else latency_table(result)
        if mark(path.name) in text:
            text = under(path.name, table, text)
        else:
            parts = [
                f"### {result['model']}",
                f"{result['environment']['hardware']}:",
                commands(result, path.name),
                table,
            ]
            if several_sizes(result):
                parts.append(f"![How many times as fast as the original]({path.stem}.png)")
            others.append("\n\n".join(parts))
    return under(SLOWER, rows_below_one(), under(OTHERS, "\n\n".join(others), text))


def rows_below_one() -> str:
    """How many rows of the fixed plans are slower than their originals, and which are by more than 3 %."""
    found = []
    for path in sorted(RESULTS.glob("edge-*.json")):
        result = read_result(path)
        if result["kind"] != KIND:
            rows = [row for row in result["rows"] if row["attention"].partition(":")[0] in FIXED and "ratio" in row]
            found += [(round(ratio(row), 2), result["model"], row) for row in rows]
    slower = [(times, model, row) for times, model, row in found if times < 1]
    told = [
        f"- {times:.2f}: `{model}` by `{row['attention']}` at {row['resolution']} pixels, "
        f"{TITLES.get(row['runtime'], row['runtime'])}, threads: {row['threads']}"
        for times, model, row in sorted(slower, key=lambda entry: entry[0])
        if times < LITTLE
    ]
    eager = sum(row["runtime"] == "eager" for _, _, row in slower)
    ends = ", all by 3 % at most." if not told else "; by more than 3 %:\n\n" + "\n".join(told)
    return f"Of {len(found)} rows of the fixed plans {len(slower)} are below 1, {eager} of them eager{ends}"


def several_sizes(result: dict[str, Any]) -> bool:
    return len({row["resolution"] for row in result["rows"]}) > 1


def commands(result: dict[str, Any], name: str) -> str:
    """What measured a result of `bench edge`: a command for each size, for larger ones go to fewer runtimes."""
    rows, lines = result["rows"], []
    words = [f"linvit bench edge {result['model']} --plan {','.join(result['plans'])}"]
    words += [f"--model-arg {key}={value}" for key, value in result["args"].items()]
    words += [f"--drop {','.join(result['drop'])}"] if result["drop"] else []
    words.append(f"--threads {','.join(map(str, sorted({row['threads'] for row in rows})))}")
    words += re.findall(r"--budget \S+", result["environment"]["command"])
    for size in dict.fromkeys(row["resolution"] for row in rows):
        runtimes = dict.fromkeys(row["runtime"] for row in rows if row["resolution"] == size)
        where = f"--resume {name}" if lines else f"-o {name}"
        lines.append(f"    {' '.join(words)} \\\n        --size {size} --runtime {','.join(runtimes)} {where}")
    return "\n".join(lines)


def mark(name: str) -> str:
    return f"<!-- {name}: written by `make docs` -->\n"


def under(name: str, content: str, text: str) -> str:
    """The text with this content under the mark of that name."""
    before, start, rest = text.partition(mark(name))
    end = "<!-- end -->"
    return f"{before}{start}\n{content}\n\n{end}{rest.partition(end)[2]}"


def plot(folder: Path) -> None:
    """The plots that the page shows, of results with more than one size."""
    text = PAGE.read_text(encoding="utf-8")
    for path in sorted(RESULTS.glob("edge-*.json")):
        picture = f"{path.stem}.png"
        if f"({picture})" in text:
            plot_edge(read_result(path), folder / picture)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = asked.add_subparsers(dest="verb", required=True)
    verbs.add_parser("docs")
    mobile = verbs.add_parser("mobile")
    mobile.add_argument("-o", "--output", type=Path, required=True)
    mobile.add_argument("--model", default=",".join(line[0] for line in TABLE), help="Some of them, with commas.")
    mobile.add_argument("--runtime", default=",".join(RUNTIMES))
    mobile.add_argument("--files", type=Path, help="Keep the exported files here; those that are there are used.")
    mobile.add_argument("--budget", type=float, default=1.5)
    given = asked.parse_args()
    if given.verb == "docs":
        PAGE.write_text(page(), encoding="utf-8")
        plot(PAGE.parent)
    else:
        names, runtimes = given.model.split(","), given.runtime.split(",")
        measure(given.output, titles=names, runtimes=runtimes, files=given.files, budget=given.budget)


if __name__ == "__main__":
    main()
