"""Names of the hub, and the files of a model behind one: from the hub, or from its cache where that has them."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from linvit.errors import LinvitError, reason

PATIENCE = 5  # seconds that the hub has to answer
PREFIXES = ("hf-hub:", "hf_hub:")
REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
CONFIG, WEIGHTS, INDEX, PROCESSOR = (
    *("config.json", "model.safetensors"),
    *("model.safetensors.index.json", "preprocessor_config.json"),
)


@dataclass(frozen=True)
class Repository:
    """A model on the hub, at a branch, a tag or a commit."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return PREFIXES[0] + self.name + (f"@{self.revision}" if self.revision else "")


def repository(name: str, revision: str | None = None) -> Repository | None:
    """What `hf-hub:user/name` or `user/name` means, with `@revision` behind it or without; none for other names. Where
    there is a folder `user`, `user/name` is a path."""
    bare = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
    found = REPOSITORY.fullmatch(bare)
    if found is None:
        if bare != name:
            raise LinvitError(f"'{name}' names no model of the hub: give hf-hub:user/name")
        return None
    if bare == name and (Path(name).exists() or Path(name).parent.is_dir()):
        return None
    return Repository(found["name"], revision or found["revision"])


def fetch_model(found: Repository, *, weights: bool = True) -> Path:
    """The folder with a model's config and, unless told otherwise, its weights: safetensors and never a pickle."""
    config = fetch(found, CONFIG)
    assert config is not None
    folder = config.parent
    kind = kind_in(folder)
    if kind == "timm" or not (weights or kind == "linvit"):  # timm fetches by itself; ours has no other weights
        return folder
    fetch(found, PROCESSOR, needed=False)
    if fetch(found, WEIGHTS, needed=False) is None:
        index = fetch(found, INDEX, needed=False)
        if index is None:
            raise LinvitError(f"{found.name} has no {WEIGHTS}: linvit does not read pickles, which may run code")
        for file in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
            fetch(found, str(file))
    return folder


def fetch(found: Repository, file: str, *, needed: bool = True) -> Path | None:
    """A file of a model, from the hub or its cache; what keeps it from being fetched is one line."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it tells of every retry; one line comes at the end
    if file == WEIGHTS and sys.stderr.isatty():
        print(f"fetching the weights of {found.name}", file=sys.stderr)
    try:
        with no_waiting_for_the_hub():
            return Path(hf_hub_download(found.name, file, revision=found.revision))
    except (LocalEntryNotFoundError, ConnectionError) as error:
        if not needed:
            return None
        where = f"there is no folder {found.name}, and the Hugging Face hub, which cannot be reached,"
        raise LinvitError(f"{where} has not left {found.name} in its cache") from error
    except EntryNotFoundError as error:
        if not needed:
            return None
        raise LinvitError(f"{found.name} on the Hugging Face hub has no {file}") from error
    except GatedRepoError as error:
        raise LinvitError(
            f"{found.name} is gated: ask for access on its page, and log in by `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise LinvitError(f"{found.name} on the Hugging Face hub has no revision '{found.revision}'") from error
    except RepositoryNotFoundError as error:
        private = "or it is private and wants `hf auth login`"
        raise LinvitError(f"there is no model {found.name}, here or on the Hugging Face hub, {private}") from error
    except Exception as error:  # whatever else the hub or the network makes of it
        raise LinvitError(f"cannot fetch {found.name}: {reason(error)}") from error


@contextmanager
def no_waiting_for_the_hub() -> Iterator[None]:
    """The Hugging Face hub is asked once. Where it does not answer, what its cache holds is taken, and anything else is
    an error at once: left alone, it would be asked again and again, for a minute and in silence."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    if not offline and not reachable():
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        if offline or not constants.HF_HUB_OFFLINE:
            raise
        raise ConnectionError("the Hugging Face hub cannot be reached and its cache does not hold them") from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def reachable() -> bool:
    """Whether the hub answers at all."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # whatever the network makes of it
        return False
    return True


def kind_in(folder: Path) -> str:
    """Whose model a folder holds, by its config: linvit's, transformers' or timm's; none where that is not told."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    marks = {"linvit": "linvit", "model_type": "transformers", "architecture": "timm"}
    return next((kind for mark, kind in marks.items() if isinstance(config, dict) and mark in config), "")
