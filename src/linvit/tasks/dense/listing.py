"""Names of categories that lie in a file beside the images."""

import json
from typing import Any

from linvit.errors import LinvitError
from linvit.tasks.dense.files import Files, join

ADE = "objectInfo150.txt"
FILES = ("classes.txt", "classes.json", "categories.txt", "categories.json")


def listed_names(files: Files, base: str) -> dict[int, str]:
    """The names of categories by their numbers in mask files; none where nothing lists them.

    `classes.txt` has a name in each line and `classes.json` a list of names, which count from 0, or names by number,
    `{"1": "road", "2": "car"}`. ADE20K's `objectInfo150.txt` counts from 1."""
    if files.has(join(base, ADE)):
        lines = [line.split("\t") for line in files.text(join(base, ADE)).splitlines()[1:] if line.strip()]
        return {int(cells[0]): cells[-1].split(",")[0].strip() for cells in lines}
    found = next((join(base, name) for name in FILES if files.has(join(base, name))), None)
    if found is None:
        return {}
    if found.endswith(".txt"):
        names: Any = [line.strip() for line in files.text(found).splitlines() if line.strip()]
    else:
        names = files.json(found)
    if isinstance(names, dict) and names and all(key.isdecimal() for key in names):
        names = {int(key): str(name) for key, name in names.items()}
        return dict(sorted(names.items()))
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return dict(enumerate(names))
    example = json.dumps({"0": "sky", "1": "sea"})
    raise LinvitError(f"{files.full(found)} lists no categories: give names, or names by number such as {example}")
