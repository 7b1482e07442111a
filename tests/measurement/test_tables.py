"""The published tables: what must agree does, what does not is explained, nothing is hidden."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import timm

from linvit.cli import main
from linvit.measurement import tables as measurement
from linvit.measurement.published import TABLES, Printed, Section, Table
from linvit.measurement.tables import TableRow, compare_row, compare_table

every = pytest.mark.parametrize("name", list(TABLES))


@cache
def rows(name: str) -> list[TableRow]:
    return list(compare_table(TABLES[name]))


@every
def test_check_passes(name: str) -> None:
    assert [f"{row.printed.label}: {row.failure}" for row in rows(name) if row.wrong] == []


@every
def test_differences_are_real_and_explained(name: str) -> None:
    for row in rows(name):
        if not row.printed.model:
            assert row.printed.note
        for cell in row.printed.differs:
            assert row.printed.note and not getattr(row, cell).agrees, f"{row.printed.label}: {cell} agrees by now"


def test_fair_counts() -> None:
    found = rows("fair")
    assert len(found) == 18
    assert [row.printed.label for row in found if not row.params.agrees] == ["COL-14"]
    assert all(abs(row.macs.error or 1) <= 0.0005 for row in found)
    by_label = {row.printed.label: row for row in found}
    assert f"{by_label['COL-16'].params.ours:.2f}" == by_label["COL-14"].printed.params  # the cell that COL-14 repeats
    assert by_label["AA-4"].params.ours == pytest.approx(28.280, abs=5e-4)


def test_qtvit_counts() -> None:
    found = rows("qtvit")[:6]
    assert [row.printed.label for row in found] == [f"QT-ViT-{n}" for n in range(1, 7)]
    for row in found:
        assert f"{row.params.ours:.1f}" == row.printed.params
        assert abs(row.macs.error or 1) < 0.01


def test_a_whole_segmenter_is_counted() -> None:
    """At 640 pixels its backbone's MACs, which are the paper's, and more for the decoders than the paper has."""
    pytest.importorskip("transformers")
    found = {row.printed.label: row for row in rows("castling")}
    for label, backbone in (("ViT-B, whole", "ViT-B"), ("Castling-ViT-B, whole", "Castling-ViT-B")):
        whole, inside = found[label], found[backbone]
        assert f"{whole.params.ours:.0f}" == whole.printed.params == "118"
        assert whole.macs.ours is not None and inside.macs.ours is not None and whole.macs.ours > inside.macs.ours + 47


@every
def test_models_exist(name: str) -> None:
    for row in TABLES[name].rows:
        assert not row.model or timm.is_model(row.model)


def small(*rows: Printed) -> Table:
    return Table("Small", "A remark.", (Section("Part", rows),))


LINEAR = {"num_classes": 10}
RIGHT = Printed("Right", "resnet10t", "4.9", options=LINEAR)
WRONG = Printed("Wrong", "resnet10t", "5.9", "0.1", "70.0", options=LINEAR)
EXPLAINED = Printed("Explained", "resnet10t", "5.9", note="Printed by mistake.", differs=("params",), options=LINEAR)
MISSING = Printed("Missing", "no_such_model", "1.0")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a table of the given rows in the place of the published ones."""

    def put(*rows: Printed) -> None:
        monkeypatch.setattr("linvit.measurement.published.TABLES", {"small": small(*rows)})

    return put


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["tables", *args])
    return int(stop.value.code or 0), capsys.readouterr().out


def test_a_row_that_should_match_fails_the_check(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table(RIGHT, EXPLAINED)
    code, out = run(capsys, "--check")
    assert code == 0 and "Printed by mistake." in out and "parameters: 1 of 2" in out
    table(RIGHT, WRONG)
    code, out = run(capsys, "--check")
    assert code == 1 and "✗" in out and "1 wrong" in out
    assert run(capsys)[0] == 0


def test_a_model_that_fails_is_printed_and_fails(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table(RIGHT, MISSING)
    code, out = run(capsys)
    assert code == 1 and "no_such_model: " in out and "failed" in out


def test_json(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table(RIGHT, WRONG)
    code, out = run(capsys, "small", "--json")
    found = json.loads(out)["small"]["rows"]
    assert code == 0 and [row["params_millions"]["agrees"] for row in found] == [True, False]
    assert found[1]["macs_billions"]["published"] == 0.1 and found[1]["accuracy"] == "70.0"


def test_lines_fit_a_hundred_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measurement, "compare_table", lambda table: rows(next(k for k, t in TABLES.items() if t is table))
    )
    code, out = run(capsys)
    assert code == 0 and "…" not in out.replace("QT-ViT-1 … 6", "")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    for name in TABLES:
        assert all(row.label.strip() in out and row.accuracy in out for row in TABLES[name].rows)


def test_unknown_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tables", "fare"])
    assert stop.value.code == 2 and "did you mean fair?" in capsys.readouterr().err


def test_printed_digits() -> None:
    assert measurement.is_printed(22.049, "22.0") and not measurement.is_printed(22.051, "22.0")
    assert measurement.is_printed(24.4, "24") and measurement.is_printed(1.0, "")
    assert measurement.is_near(3.954, "4.0", 0.01) and not measurement.is_near(3.94, "4.0", 0.01)


def test_compare_row_counts_the_papers_way() -> None:
    row = Printed("Without BatchNorm", "resnet10t", "4.9", left_out="batch_norm", options=LINEAR)
    found = compare_row(row, small(row))
    assert found.params.agrees and found.params.ours is not None and not found.failure
