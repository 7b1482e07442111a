"""Whether a run that goes on is the one that was begun."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.files import read_json, write_json
from linvit.training.config import FREE, Config

RUN = "run.json"
DIGESTS = "digests"  # of the sets, in what a run notes of itself; none where an image of it is to be replaced


def check_same(folder: Path, config: Config, identity: Mapping[str, Any]) -> None:
    """Say what differs when somebody goes on with a run by another recipe, model or set."""
    begun = read_json(folder / RUN)
    if not isinstance(begun, dict) or not isinstance(begun.get("config"), dict):
        return  # the checkpoints know as well, only not what
    ours, settings = config.to_dict(), begun["config"].items()
    was = next((f"{key}={value}" for key, value in settings if key not in FREE and ours.get(key) != value), None)
    if was is None:
        now = json.loads(json.dumps(identity))
        known = [key for key in now if key in begun and (key != DIGESTS or begun[key])]
        was = next((in_words(key, begun[key]) for key in known if begun[key] != now[key]), None)
    if was is not None:
        raise LinvitError(f"the run in {folder} was begun with {was}: resume it so, or give another folder")


def note_digests(folder: Path, digests: list[str | None] | None) -> None:
    """Write down by what the sets of a run are known from now on."""
    begun = read_json(folder / RUN)
    if isinstance(begun, dict) and begun.get(DIGESTS) != digests:
        write_json(folder / RUN, {**begun, DIGESTS: digests})


def in_words(key: str, value: Any) -> str:
    """Something that a run was begun with, as people say it."""
    if key == "loaders":
        return f"loader {value[0] if len({*value}) == 1 else 'auto'}"
    if key == "classes" and value:
        return f"classes {', '.join(value[:3])}{', …' if len(value) > 3 else ''} in this order"
    if key == DIGESTS:
        return "other images or labels of the same number"
    if key == "sets":
        return " and ".join(f"{one['images']:,} images of {one['name']}" for one in value)
    return f"{key} {value}" if value not in ("", None, [], {}) else f"no {key}"
