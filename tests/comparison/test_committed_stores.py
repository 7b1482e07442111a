"""The results that are committed with the project still read, whole, and have the keys that they had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from linvit.codec import to_plain
from linvit.comparison.description.request import from_result
from linvit.comparison.results import Run
from linvit.comparison.scheduling.store import Store
from linvit.comparison.scheduling.travel import merge, open_store
from linvit.comparison.statistics.reading import read

STORES = Path(__file__).parents[2] / "benchmarks" / "stores"
# A teacher that was trained before its recipe had a field that counts, and what the key of that training would be now.
EARLIER = {"3f6f37074fd6b15b": ("2026-11-15T11:12:18+00:00", "8848966ecca4fa4d")}
paths = sorted(path for path in STORES.iterdir() if path.is_dir() or ".tar" in path.name)


@pytest.fixture(scope="module", params=paths, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store's folder, unpacked where it is an archive."""
    path: Path = request.param
    if path.is_file():
        store = Store(tmp_path_factory.mktemp("stores") / path.name.partition(".")[0])
        merge(store, path)
        assert list(open_store(path).results()) == list(store.results())
        path = store.folder
    yield path


def test_there_are_some() -> None:
    assert len(paths) == 9


def test_every_file_is_read_and_would_be_written_again(folder: Path) -> None:
    """What the schema makes of a file is all that the file says, and nothing else."""
    store = Store(folder)
    files = [path for name in ("runs", "speeds", "failures") for path in sorted((folder / name).glob("*.json"))]
    assert files
    for path in files:
        written = json.loads(path.read_text())
        written.pop("digest", None)  # which reading has checked; older files have none
        assert to_plain(store.read(path)) == written, path.name
    assert not store.notes
    comparisons = list(folder.glob("comparisons/*.json"))
    assert len(store.comparisons()) == len(comparisons) and not store.notes


def test_keys_are_those_of_their_identities(folder: Path) -> None:
    """A key that changes here makes every finished run be done again."""
    for result in Store(folder).results():
        *teachers, job = from_result(to_plain(result), {})
        time, key = EARLIER.get(result.key, ("", ""))
        wanted = key if result.environment.time == time else result.key
        assert (job.key, job.candidate_key) == (wanted, result.candidate_key)
        taught = result.identity.teacher if isinstance(result, Run) else None
        assert len(teachers) == bool(taught)
        assert all(teacher.key in (taught.key, EARLIER.get(taught.key, ("", ""))[1]) for teacher in teachers)
    found = read([folder])
    assert found.runs and not found.notes
    for run in found.runs:  # of a segmenter nothing is known image by image
        assert (run.right is None) == (run.accuracy.metric == "mIoU")
