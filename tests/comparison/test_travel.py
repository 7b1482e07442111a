"""A store packed into an archive, and merged with others."""

from __future__ import annotations

import io
import json
import lzma
import os
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linvit.comparison.description.spec import load
from linvit.comparison.scheduling import travel
from linvit.comparison.scheduling.store import Store
from linvit.comparison.scheduling.travel import PackedStore, merge, open_store, pack, store_name
from linvit.errors import LinvitError, Unwritable
from tests.comparison.jobs import make_job, make_result, runs_of
from tests.full_disk import small_files


def contents(folder: Path) -> dict[str, bytes]:
    """All that counts of a store, by name."""
    names = ("runs", "speeds", "failures", "repeats", "comparisons", "teachers", "work")
    files = (path for name in names for path in (folder / name).rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def test_pack_and_merge(tmp_path: Path) -> None:
    store, teacher, run, half = Store(tmp_path / "here"), make_job(1, "teacher"), make_job(2), make_job(3)
    for job in (teacher, run):
        store.write(job, make_result(job))
    store.add_failure(store.failure(half, "no luck"))
    store.ask(load("digits"))
    for folder in (store.teacher_folder(teacher.key), store.teacher_folder(half.key), store.work_folder(half.key)):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    pack(store, tmp_path / "out" / "store.tar")
    pack(store, tmp_path / "whole.tar.gz", work=True)
    light, whole = Store(tmp_path / "light"), Store(tmp_path / "whole")
    added = merge(light, tmp_path / "out" / "store.tar")
    assert added == {
        **{"runs": 2, "speeds": 0, "failures": 1, "comparisons": 1, "repeats": 0},
        **{"teachers": 1, "work": 0},
    }
    assert not light.notes and light.finished(run) and light.comparisons() == store.comparisons()
    assert light.teacher_folder(teacher.key).exists() and not light.teacher_folder(half.key).exists()
    assert merge(whole, tmp_path / "whole.tar.gz")["work"] == 1
    assert (whole.work_folder(half.key) / "model.safetensors").read_bytes() == b"x" * 100
    assert not any(merge(whole, tmp_path / "here").values()), "nothing is new"
    assert not list((tmp_path / "light").glob(".merging*"))


def test_work_under_way_here_is_not_touched(tmp_path: Path) -> None:
    job = make_job(1)
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    (there.work_folder(job.key)).mkdir(parents=True)
    there.add_failure(there.failure(make_job(9), "so that it is a store"))
    claim = here.claim(job)
    assert claim is not None and merge(here, tmp_path / "there")["work"] == 0
    claim.release()
    assert merge(here, tmp_path / "there")["work"] == 1


def test_a_cut_archive_gives_what_it_has(tmp_path: Path) -> None:
    store = Store(tmp_path / "here")
    for number in range(30):
        store.write(make_job(number), make_result(make_job(number)))
    pack(store, tmp_path / "store.tar")
    content = (tmp_path / "store.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: len(content) // 2])
    other = Store(tmp_path / "there")
    added = merge(other, tmp_path / "cut.tar")
    assert 5 < added["runs"] < 30 and "cannot be read to its end" in other.notes[0]
    assert len(runs_of(other)) == added["runs"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_an_archive_is_read_where_it_is(tmp_path: Path, suffix: str) -> None:
    store = Store(tmp_path / "here")
    for job in (make_job(1), make_job(2, "teacher"), make_job(3, "speed")):
        store.write(job, make_result(job))
    store.add_failure(store.failure(make_job(4), "no luck"))
    (tmp_path / "here" / "runs" / "notes.json").write_text("[1]")
    path = tmp_path / f"here.{suffix}"
    assert pack(store, path) == 5
    found, folder = open_store(path), open_store(tmp_path / "here")
    assert list(found.results()) == list(folder.results()) and len(list(found.results())) == 4
    assert "runs/notes.json was left aside" in found.notes[0] and store_name(path) == store_name(tmp_path / "here")
    assert {entry.name for entry in tmp_path.iterdir()} == {"here", path.name}, "nothing is unpacked"


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_the_same_files_make_the_same_archive(tmp_path: Path, suffix: str) -> None:
    """Whenever, in whatever order and by whomever they were written."""
    archives = []
    for folder, numbers, moment in (("a", (1, 2), 1e9), ("b", (2, 1), 1.5e9)):
        store = Store(tmp_path / folder / "store")
        for number in numbers:
            store.write(make_job(number), make_result(make_job(number)))
            os.utime(store.path(make_job(number)), (moment, moment))
        pack(store, tmp_path / folder / f"store.{suffix}")
        archives.append((tmp_path / folder / f"store.{suffix}").read_bytes())
    assert archives[0] == archives[1]


def test_an_archive_that_swells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "here")
    store.write(make_job(1), make_result(make_job(1), command="x" * 5000))
    pack(store, tmp_path / "here.tar.xz")
    for limit in ("LARGEST", "MOST"):
        with monkeypatch.context() as patch:
            patch.setattr(travel, limit, 4000)
            patch.setattr(travel, "SWELLING", 0)
            with pytest.raises(LinvitError, match="holds more than"):
                list(PackedStore(tmp_path / "here.tar.xz").results())
            with pytest.raises(LinvitError, match="holds more than a store could: not merged"):
                merge(Store(tmp_path / "there"), tmp_path / "here.tar.xz")
            assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert merge(Store(tmp_path / "there"), tmp_path / "here.tar.xz")["runs"] == 1
    assert len(list(PackedStore(tmp_path / "here.tar.xz").results())) == 1


def test_a_small_archive_cannot_fill_a_disk(tmp_path: Path) -> None:
    """613 kB became 600 MB."""
    with lzma.open(tmp_path / "bomb.tar.xz", "wb", preset=0) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(12):
            info = tarfile.TarInfo(f"store/teachers/{number:016x}/model.safetensors")
            info.size = 2**23
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    assert (tmp_path / "bomb.tar.xz").stat().st_size < 2**18
    with pytest.raises(LinvitError, match="holds more than a store could: not merged"):
        merge(Store(tmp_path / "there"), tmp_path / "bomb.tar.xz")
    assert not list((tmp_path / "there").iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """And nothing is half there: neither in the archive nor in the store."""
    store, teacher = Store(tmp_path / "here"), make_job(1, "teacher")
    store.write(teacher, make_result(teacher))
    folder = store.teacher_folder(teacher.key)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(100_000))
    pack(store, tmp_path / "store.tar")
    with small_files(50_000):
        with pytest.raises(Unwritable, match=r"cannot write .*again.tar: File too large"):
            pack(store, tmp_path / "again.tar")
        with pytest.raises(Unwritable, match=r"cannot merge .*store.tar into .*: .*File too large"):
            merge(Store(tmp_path / "there"), tmp_path / "store.tar")
        with pytest.raises(Unwritable, match=r"cannot write .*File too large"):
            merge(Store(tmp_path / "elsewhere"), store.folder)
    assert not (tmp_path / "again.tar").exists() and not list((tmp_path / "there").iterdir())
    assert not (tmp_path / "elsewhere" / "teachers" / teacher.key).exists()
    assert merge(Store(tmp_path / "there"), tmp_path / "store.tar")["teachers"] == 1


def test_a_large_file_in_a_folder_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, job = Store(tmp_path / "here"), make_job(1)
    store.write(job, make_result(job))
    monkeypatch.setattr(travel, "LARGEST", 100)
    other = Store(tmp_path / "there")
    assert not any(merge(other, store.folder).values()) and "larger than a result could be" in other.notes[0]


def test_a_flipped_bit_in_an_archive_changes_nothing_without_a_note(tmp_path: Path) -> None:
    store, teacher = Store(tmp_path / "here"), make_job(9, "teacher")
    for job in (teacher, *(make_job(number) for number in range(3))):
        store.write(job, make_result(job, top1=51.25))
    store.ask(load("digits"))
    folder = store.teacher_folder(teacher.key)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(2000))
    pack(store, tmp_path / "store.tar")
    content, wanted = (tmp_path / "store.tar").read_bytes(), contents(store.folder)
    chance, noted = random.Random(0), 0
    for number in range(60):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content) - 5000)] ^= 1 << chance.randrange(8)
        (tmp_path / "damaged.tar").write_bytes(damaged)
        other, changed = Store(tmp_path / f"there{number}"), True
        try:
            merge(other, tmp_path / "damaged.tar")
            changed = contents(other.folder) != wanted
            assert all(wanted.get(name) == found for name, found in contents(other.folder).items())
        except LinvitError as error:
            other.note(str(error))
        assert bool(other.notes) or not changed
        noted += changed
        try:
            read = open_store(tmp_path / "damaged.tar")
            results = list(read.results())
            assert read.notes or results == list(store.results())
        except LinvitError:
            pass
    assert noted > 20


def test_a_result_that_was_changed_is_left_aside(tmp_path: Path) -> None:
    store, job = Store(tmp_path), make_job(1)
    store.write(job, make_result(job, top1=51.25))
    path = store.path(job)
    path.write_text(path.read_text().replace("51.25", "91.25"))
    assert not store.finished(job) and "it is damaged: its digest is wrong" in store.notes[0]
    old = json.loads(path.read_text())
    del old["digest"]
    path.write_text(json.dumps(old))
    assert store.finished(job), "files from before there were digests are believed"


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "store.tar").write_bytes(b"")
    (tmp_path / "store.tar.xz").write_text("hello")
    for name in ("store.tar", "store.tar.xz"):
        with pytest.raises(LinvitError, match="is no archive of a store"):
            list(open_store(tmp_path / name).results())
    with pytest.raises(LinvitError, match="no store"):
        open_store(tmp_path / "nowhere.tar")


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    store = Store(tmp_path / "here")
    for path, message in (("nowhere", "no store at"), ("empty", "holds no store"), ("text", "holds no store")):
        with pytest.raises(LinvitError, match=message):
            merge(store, tmp_path / path)


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.add(tmp_path / "x", "../../escaped")
    with pytest.raises(LinvitError):
        merge(Store(tmp_path / "a" / "b"), tmp_path / "bad.tar")
    assert not list(tmp_path.rglob("escaped"))


versions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=8)


def fill(folder: Path, made: list[tuple[int, int]]) -> Store:
    """A store with results of some keys, each in some version; later versions of a key are merged in."""
    store = Store(folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for i, (number, version) in enumerate(made):
        job = make_job(number)
        other = Store(folder.with_name(f"{folder.name}-{i}"))
        other.write(job, make_result(job, time=f"2026-01-0{version + 1}", version=version))
        merge(store, other.folder)
    return store


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=versions, b=versions)
def test_merging_loses_nothing_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    tmp = tmp_path_factory.mktemp("merge")
    first, second = fill(tmp / "a", a), fill(tmp / "b", b)
    one, two = Store(tmp / "one"), Store(tmp / "two")
    for store, order in ((one, (first, second)), (two, (second, first))):
        for other in order:
            merge(store, other.folder)
    assert contents(one.folder) == contents(two.folder)
    before = contents(one.folder)
    assert not any(merge(one, second.folder).values()) and not any(merge(one, two.folder).values())
    assert contents(one.folder) == before
    kept = [json.loads(content) for content in before.values()]
    assert {(r["key"], r["version"]) for r in kept} == {(make_job(n).key, v) for n, v in {*a, *b}}
    assert len(kept) == len({*a, *b}), "nothing doubled"
    for result in runs_of(one):
        assert result.version == min(v for n, v in {*a, *b} if make_job(n).key == result.key)
