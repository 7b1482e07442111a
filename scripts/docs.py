"""Render what documents take from docstrings. Run by `make docs`.

docs/mechanisms/ has one page a mechanism, docs/conversion.md a table of the hosts.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from linvit.attention import Mechanism, Size, TokenGrid, create_attention, mechanism_class
from linvit.cli.list import differences, mechanisms
from linvit.conversion import huggingface
from linvit.conversion.host import Host
from linvit.conversion.hosts import HOSTS

FOLDER = Path(__file__).parent.parent / "docs" / "mechanisms"
GUIDE = FOLDER.parent / "conversion.md"
GRIDS = (TokenGrid(14, 14, 1), TokenGrid(28, 28, 1), TokenGrid(56, 56, 1))
HEADS, HEAD_DIM = 6, 64

NOTE = """Unless “differs” says otherwise a mechanism takes any number of tokens, prefix tokens, pooled keys,
wide values, key masks and rotary position, and has an implied map.

Every one takes `local`, the odd width of a depthwise convolution over the grid that is added to its output, and
`dynamic`, the width of one whose filters an MLP makes from each image's mean values, as JetViT's. Both are zero at
first (0: none). Those with a feature map also take `centre`, which subtracts the mean of the keys from each before the
map: softmax does not see what all keys share, so its weights lose nothing by it. Those whose features are rotated take
`rotary="before"`, which rotates q and k instead and sees absolute positions."""


def pages() -> dict[str, str]:
    """File name to text, the index included."""
    rows = mechanisms()
    found = {f"{row['name']}.md": page(row) for row in rows}
    return {"README.md": index(rows), **found}


def index(rows: list[dict[str, Any]]) -> str:
    lines = ["# Mechanisms", "", "Rendered from the docstrings by `make docs`.", ""]
    lines += ["| mechanism | paper | cost | differs |", "|---|---|---|---|"]
    for row in rows:
        cost = "N" if row["capabilities"]["linear"] else "N²"
        differs = ", ".join(differences(row["capabilities"]))
        lines.append(f"| [{row['name']}]({row['name']}.md) | {row['paper']} | {cost} | {differs} |")
    lines += ["", NOTE, ""]
    return "\n".join(lines)


def page(row: dict[str, Any]) -> str:
    cls = mechanism_class(row["name"])
    parts = [f"# {row['name']}", f"Paper: {row['paper']}.", *texts(cls)]
    if row["variants"]:
        default, *others = (f"`{variant}`" for variant in row["variants"])
        parts.append(f"Variants: {', '.join([f'{default} (default)', *others])}.")
    if row["options"]:
        options = [f"| `{name}` | `{default!r}` |" for name, default in row["options"].items()]
        parts.append("\n".join(["| option | default |", "|---|---|", *options]))
    parts.append(call(build(row["name"], GRIDS[0])))
    differs = differences(row["capabilities"])
    cost = "linear" if row["capabilities"]["linear"] else "quadratic"
    parts.append(f"Cost: {cost} in the tokens. Differs from the usual: {', '.join(differs) or 'nothing'}.")
    parts.append(macs(row["name"]))
    return "\n\n".join(parts) + "\n"


def texts(cls: type[Mechanism]) -> list[str]:
    """The class's docstring where it has its own, then its file's."""
    own = cls.__doc__ or ""
    return [inspect.cleandoc(text) for text in (own, sys.modules[cls.__module__].__doc__ or "") if text]


def call(mechanism: Mechanism) -> str:
    """How to call it, with what it needs and nothing else."""
    shape = {"heads": HEADS, "head_dim": HEAD_DIM, "grid": "grid"}
    needs = [f"{field}={value}" for field, value in shape.items() if field in mechanism.built_for]
    grid = mechanism.capabilities.grid or "grid" in mechanism.built_for
    lines = ["```python", "import linvit", ""]
    if grid:
        prefix = ", prefix=1" if mechanism.capabilities.prefix else ""
        lines.append(f"grid = linvit.TokenGrid(14, 14{prefix})")
    lines.append(f"attention = linvit.create_attention({', '.join([repr(mechanism.name), *needs])})".replace("'", '"'))
    arguments = ["q", "k", "v", *(["grid"] if grid else []), *(["x=x"] if mechanism.capabilities.input else [])]
    lines += [f"out = attention({', '.join(arguments)})  # each (batch, {HEADS}, tokens, {HEAD_DIM})", "```"]
    return "\n".join(lines)


def macs(name: str) -> str:
    """Multiply-accumulates of one call with DeiT-S's heads, beside softmax's."""
    lines = ["| MACs, 6 heads of 64 | " + " | ".join(f"N = {grid.tokens}" for grid in GRIDS) + " |"]
    lines.append("|---|" + "---:|" * len(GRIDS))
    for row in dict.fromkeys((name, "softmax")):
        counts = [f"{count(row, grid) / 1e6:,.1f} M" for grid in GRIDS]
        lines.append(f"| {row} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def count(name: str, grid: TokenGrid) -> int:
    return build(name, grid).macs(Size(1, HEADS, HEAD_DIM, HEAD_DIM, grid, grid))


def build(name: str, grid: TokenGrid) -> Mechanism:
    return create_attention(name, heads=HEADS, head_dim=HEAD_DIM, grid=grid)


def conversion() -> str:
    """docs/conversion.md with its table of host families as their docstrings have it."""
    families: list[tuple[str, list[type[Host]]]] = []
    for host in (*HOSTS, *huggingface.HOSTS):
        text = vars(host).get("__doc__")
        if text and (not families or families[-1][0] != text):
            families.append((text, []))
        families[-1][1].append(host)
    rows, prose = [], []
    for text, hosts in families:
        places = (re.sub(r"^timm\.(models\.)?|models\.\w+\.modeling_", "", h.original.__module__) for h in hosts)
        names, told = ", ".join(f"`{place}`" for place in dict.fromkeys(places)), one_line(text)
        rows.append(f"| {names} | {exact_for(told)} | {needs_drop(told)} | {sizes(told)} |")
        prose.append(f"- {names}: {told}")
    lines = ["| modules | converts, exact for | others need `drop` | image sizes |", "|---|---|---|---|", *sorted(rows)]
    lines += ["", *sorted(prose)]
    start, end = "<!-- families: written by `make docs` -->\n", "<!-- end of families -->"
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(start)
    return before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]


def exact_for(text: str) -> str:
    """The mechanism that a family's docstring says it has natively; where layers stay softmax, that too."""
    native = re.search(r"(?:[Nn]ative is(?: the mechanism)?|natively with ReLU) (?:`(\w+)`|linear)", text)
    name = (native[1] or "relu_linear") if native else "softmax"
    stays = re.search(r"leaves it as it is|neighbours from the centre", text)
    return f"{name}; some layers may stay" if stays else name


def needs_drop(text: str) -> str:
    """The features that a family's docstring says mechanisms give up."""
    found = [name for names in re.findall(r"drop=\(([^)]*)\)", text) for name in re.findall(r"\w+", names)]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(found)) or "–"


def sizes(text: str) -> str:
    """What a family's docstring says about image sizes."""
    if re.search(r"one image size|image size the model was built for|fix(es)? the input size", text):
        return "one"
    if re.search(r"(CoAtNet|MaxViT) takes", text):
        return "any (CoAtNet), multiples of the window (MaxViT)"
    if re.search(r"its windows divide", text):
        return "multiples of the window"
    anything = r"[Aa]ny (?:input )?size|resized for (?:any|other input)|takes any\b|follows the image"
    return "any" if re.search(anything, text) else "as the original"


def one_line(text: str) -> str:
    """A docstring in one line: paragraphs run on, an indented formula becomes code."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    joined = (f"`{p.strip()}`" if p.startswith("    ") else " ".join(p.split()) for p in paragraphs)
    return re.sub(r"\|", r"\\|", " ".join(joined))


def main() -> None:
    GUIDE.write_text(conversion(), encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rendered = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in rendered:
            path.unlink()
    for name, text in rendered.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
