"""The page in a browser, made from stores of special kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from linvit.comparison.reporting import gather, render
from tests.comparison.browsing import NEEDS_BROWSER, Visit
from tests.comparison.synthetic import MECHANISMS, write_store

pytestmark = NEEDS_BROWSER


def test_the_wide_interval_of_two_seeds_is_explained_beside_it(browser: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", mechanisms=["softmax", "stella"], patches=[4], seeds=[0, 1])
    (tmp_path / "report.html").write_text(render(gather([store])), encoding="utf-8")
    visit = Visit(browser, tmp_path / "report.html")
    assert "± of two seeds is 12.7 standard errors" in visit.page.inner_text(".about")
    visit.context.close()


def test_on_a_phone_every_point_is_named_and_the_table_shows_that_it_scrolls(browser: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", patches=[4], devices=["cuda"], epochs=4)
    (tmp_path / "report.html").write_text(render(gather([store])), encoding="utf-8")
    visit = Visit(browser, tmp_path / "report.html", 390)
    names = {
        chart: visit.page.locator(f"#{chart} .name").evaluate_all(
            "names => names.map(n => [...n.children].map(line => line.textContent).join(' '))"
        )
        for chart in ("pareto", "time", "curves")
    }
    assert sorted(names["pareto"]) == sorted(visit.rows())
    for chart in ("time", "curves"):
        assert len(names[chart]) == len(MECHANISMS) and not any("…" in name for name in names[chart])
    assert visit.page.locator(".more-hint").is_visible() and visit.page.locator(".scroll.goes-on").count() == 1
    visit.page.locator("#rows .scroll").evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    visit.page.wait_for_function("!document.querySelector('.scroll.goes-on')")
    visit.context.close()
    assert visit.complaints == []


def test_lines_that_coincide_become_a_sentence(browser: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", mechanisms=["softmax", "sima", "cosformer"], patches=[4], devices=["cuda"])
    for path in store.glob("speeds/*.json"):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            row["peak_bytes"] = row["batch"] * row["tokens"] * 2**10
        path.write_text(json.dumps(data))
    (tmp_path / "report.html").write_text(render(gather([store])), encoding="utf-8")
    visit = Visit(browser, tmp_path / "report.html")
    said = visit.page.inner_text("#memory")
    assert (
        "All 3 candidates lie within two percent of each other" in said and "0.25 at 256 tokens to 16 at 16,384" in said
    )
    assert visit.points("memory") == 0 and visit.points("time") > 5
    visit.context.close()
