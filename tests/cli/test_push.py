"""Push as a user does, to a hub that is faked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import RepositoryNotFoundError

from linvit import load
from tests.cli.training import Linvit
from tests.conversion.test_hub import Api, api, run_folder  # noqa: F401


def test_a_model_is_sent_and_told_where(linvit: Linvit, tmp_path: Path, api: type[Api]) -> None:  # noqa: F811
    folder = str(run_folder(tmp_path / "run"))
    planned = linvit("push", folder, "user/deit", "--dry-run")
    assert planned.code == 0 and "nothing was sent to user/deit" in planned.out and not api.calls
    sent = linvit("push", folder, "user/deit", "--private", "--revision", "v2", "--message", "eight epochs")
    assert sent.code == 0, sent.err
    assert "Sent to https://hub/user/deit/commit/1: linvit.load('hf-hub:user/deit') reads it." in " ".join(
        sent.out.split()
    )
    assert api.calls[1:] == [("user/deit", True), ("branch", "v2"), ("message", "eight epochs")]
    assert {path.name for path in api.root.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert load(api.root) is not None and "| top-1 accuracy, % | – | 12.50 | 88.25 |" in planned.out


def test_json_and_a_hub_that_refuses(linvit: Linvit, tmp_path: Path, api: type[Api]) -> None:  # noqa: F811
    folder = str(run_folder(tmp_path / "run"))
    found = linvit("push", folder, "user/deit", "--json").json
    assert found["address"] == "https://hub/user/deit/commit/1" and "model.safetensors" in found["files"]
    answer: Any = SimpleNamespace(status_code=401, headers={}, request=None)
    api.fails = RepositoryNotFoundError("401 Client Error.\n\nInvalid username or password.", response=answer)
    refused = linvit("push", folder, "user/deit")
    assert refused.code == 2 and len(refused.err.splitlines()) == 1 and "hf auth login" in refused.err, refused.err
