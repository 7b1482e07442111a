"""A saved model, with its card, to the Hugging Face hub."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from linvit.conversion.hub.card import model_card
from linvit.conversion.hub.fetching import CONFIG, PROCESSOR, REPOSITORY, WEIGHTS, reachable
from linvit.conversion.saving import read_config, save
from linvit.errors import LinvitError, reason
from linvit.files import write

CARD = "README.md"
MARK = "<!-- written by linvit push; without this line it stays as it is -->"
FILES = (CONFIG, WEIGHTS, PROCESSOR, CARD)  # nothing else of a folder goes anywhere


@dataclass(frozen=True)
class Upload:
    """What a push would send: the files with their sizes, and the card, written anew or the folder's own."""

    repo: str
    files: tuple[tuple[str, int], ...]
    card: str
    own_card: bool


def prepare(folder: str | Path, repo: str, bench: Iterable[str | Path] = ()) -> Upload:
    """What pushing a saved model would send. Nothing is written or sent."""
    folder, repo = Path(folder), repo.removeprefix("hf-hub:")
    found = REPOSITORY.fullmatch(repo)
    if found is None or found["revision"]:
        raise LinvitError(f"'{repo}' is no name for a model on the hub: give user/name")
    if (folder / "run.json").is_file() and (folder / "best").is_dir():
        raise LinvitError(f"{folder} is a run: give one of its models, {folder / 'best'} or {folder / 'last'}")
    read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise LinvitError(f"{folder / WEIGHTS} is missing")
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    own = bool(card) and MARK not in card
    card = card if own else f"{model_card(folder, repo, bench)}\n{MARK}\n"
    sizes = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    return Upload(repo, tuple((sizes | {CARD: len(card.encode())}).items()), card, own)


def push_to_hub(
    model: nn.Module | str | Path,
    repo: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    message: str = "",
    bench: Iterable[str | Path] = (),
) -> str:
    """Send a model, or a folder that linvit saved, to `user/name` on the Hugging Face hub, and give its address.

    The repository is made where there is none, `private` if told, and the branch `revision` too. With the model goes a
    card, `README.md`, written from the run it lies in and from `bench`, result files of `linvit bench`; a card of your
    own in the folder stays as it is. The token is that of `hf auth login` unless given.
    """
    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory() as beside:
            save(model, beside)
            return push_to_hub(
                beside, repo, revision=revision, private=private, token=token, message=message, bench=bench
            )
    folder, ready = Path(model), prepare(model, repo, bench)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise LinvitError("the Hugging Face hub is switched off by HF_HUB_OFFLINE: unset it to push")
    if not reachable():
        raise LinvitError(f"cannot push {ready.repo}: the Hugging Face hub ({constants.ENDPOINT}) cannot be reached")
    if not ready.own_card:
        write(folder / CARD, ready.card)
    api = HfApi(token=token)
    try:
        api.create_repo(ready.repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(ready.repo, branch=revision, exist_ok=True)
        sent = api.upload_folder(
            repo_id=ready.repo,
            folder_path=folder,
            revision=revision,
            allow_patterns=list(FILES),
            commit_message=message or "A model saved by linvit",
        )
    except LocalTokenNotFoundError as error:
        raise LinvitError("the Hugging Face hub wants a token: `hf auth login`, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise LinvitError(
                f"the Hugging Face hub does not let you write {ready.repo}: log in by `hf auth login`, or set HF_TOKEN"
            ) from error
        raise LinvitError(f"cannot push {ready.repo}: {reason(error)}") from error
    except Exception as error:  # whatever the network makes of it
        raise LinvitError(f"cannot push {ready.repo}: {reason(error)}") from error
    return str(sent.commit_url)
