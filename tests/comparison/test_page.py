"""The page in a real browser: it is whole, quiet, asks nobody for anything, and does what its controls say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from linvit.comparison.reporting import gather, render
from tests.comparison.browsing import NEEDS_BROWSER, Visit
from tests.comparison.synthetic import MECHANISMS, write_store

pytestmark = NEEDS_BROWSER
EVIL = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both modes in one report, with a candidate whose name is an attack."""
    folder = tmp_path_factory.mktemp("page")
    first = write_store(folder / "a", mechanisms=[*MECHANISMS, EVIL], epochs=12)
    second = write_store(folder / "b", mode="distil", epochs=12)
    (folder / "report.html").write_text(render(gather([first, second])), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    opened = Visit(browser, page_file)
    yield opened
    opened.context.close()
    assert opened.complaints == []
    assert opened.requests == [page_file.as_uri()]


@pytest.mark.parametrize("width", [390, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_whole_and_quiet_and_asks_for_nothing(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    visit = Visit(browser, page_file, width, scheme)
    for chart in ("pareto", "time", "memory", "curves"):
        assert visit.points(chart) > 10
    assert len(visit.rows()) == len(MECHANISMS) + 1
    wide = visit.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")
    visit.context.close()
    assert visit.complaints == [] and visit.requests == [page_file.as_uri()]


def test_charts_stay_in_their_frame_on_a_phone(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file, 390)
    beyond = visit.page.evaluate(
        "[...document.querySelectorAll('.plot text')].filter(t => t.getBoundingClientRect().right > innerWidth"
        " || t.getBoundingClientRect().left < 0).map(t => t.textContent)"
    )
    assert beyond == []
    visit.context.close()


def test_names_from_files_are_text(visit: Visit) -> None:
    assert visit.page.evaluate("window.hacked") is None
    assert EVIL in visit.rows()
    assert visit.page.locator("main img").count() == 0


def test_labels_do_not_overlap(visit: Visit) -> None:
    for chart in ("pareto", "time", "curves"):
        boxes = visit.page.locator(f"#{chart} .name").evaluate_all(
            "names => names.map(n => n.getBBox()).map(b => [b.x + 1, b.y + 3, b.x + b.width, b.y + b.height])"
        )
        assert len(boxes) > 5
        for a, b in combinations(boxes, 2):
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3], chart


def test_sorting(visit: Visit) -> None:
    def tops() -> list[float]:
        return [float(text.split()[0]) for text in visit.column("score")]

    assert tops() == sorted(tops(), reverse=True)
    visit.page.click('[data-sort="score"]')
    assert tops() == sorted(tops())
    assert visit.page.get_attribute("th:has([data-sort=score])", "aria-sort") == "ascending"
    visit.page.click('[data-sort="name"]')
    names = visit.rows()
    assert names == sorted(names, key=str.lower)
    visit.page.focus('[data-sort="macs"]')
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("document.activeElement.dataset.sort") == "macs"


def test_filtering(visit: Visit) -> None:
    visit.page.fill("#filter", "xca lpi")
    assert visit.rows() == ["XCA + LPI (fair)"]
    assert "1 row." in visit.page.inner_text(".about")
    visit.page.fill("#filter", "MixA")
    assert set(visit.rows()) == {"stella", "mixa, 2 quadratic"}
    visit.page.fill("#filter", "")
    visit.page.select_option("#patch", "")
    assert len(visit.rows()) == 2 * (len(MECHANISMS) + 1)


def test_axes_device_and_resolution(visit: Visit) -> None:
    titles = []
    for axis in visit.page.locator("#pareto-x option").evaluate_all("options => options.map(o => o.value)"):
        visit.page.select_option("#pareto-x", axis)
        assert visit.points("pareto") > 10, axis
        titles.append(visit.page.get_attribute("#pareto svg", "aria-label"))
    assert len(set(titles)) == len(titles) >= 8
    visit.page.select_option("#pareto-x", "latency")
    before = visit.column("latency")
    visit.page.select_option("#size", "512")
    assert visit.column("latency") != before
    assert "at 512 px" in visit.page.inner_text("#pareto-caption")
    visit.page.select_option("#device", label="CPU AMD EPYC 9654, 16 cores, bf16")
    assert "CPU AMD EPYC" in visit.page.inner_text("#pareto-caption")
    assert "not measured" in visit.page.inner_text("#memory")


def test_the_front_is_that_of_the_statistics(visit: Visit) -> None:
    from linvit.comparison.statistics.estimates import pareto_front

    visit.page.select_option("#pareto-x", "macs")
    data = visit.page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    rows = [row for row in data["rows"] if row["setting"] == 0 and row["patch"] == 4]
    front = pareto_front([row["macs"] for row in rows], [row["score"] for row in rows])
    assert f"({', '.join(rows[i]['name'] for i in front)})" in visit.page.inner_text("#pareto-caption")


def test_settings_change_columns(visit: Visit) -> None:
    assert visit.page.locator('[data-sort="zero_shot"]').count() == 0
    visit.page.select_option("#setting", "1")
    assert visit.page.locator('[data-sort="zero_shot"]').count() == 1
    assert "softmax (teacher)" in visit.rows()


def test_rows_open_to_config_and_command(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file, permissions=["clipboard-read", "clipboard-write"])
    opener = visit.page.locator("#rows .opener", has_text="stella").first
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    more = visit.page.locator("tr.more")
    command = more.locator(".command pre").first.inner_text()
    assert command.startswith("linvit compare") and more.locator(".run").count() == 4
    more.locator("summary", has_text="Config").first.click()
    assert '"batch_size": 256' in more.inner_text()
    more.locator(".copy").first.click()
    visit.page.wait_for_function("[...document.querySelectorAll('.copy')].some(b => b.textContent === 'Copied')")
    assert visit.page.evaluate("navigator.clipboard.readText()") == command
    opener.click()
    assert visit.page.locator("tr.more").count() == 0
    visit.context.close()
    assert visit.complaints == []


def test_a_link_to_a_run_opens_its_row(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file)
    data = visit.page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    row = next(row for row in data["rows"] if row["setting"] == 1 and row["candidate"] == "qt" and row["patch"] == 8)
    visit.page.evaluate("key => { location.hash = 'run-' + key; }", row["runs"][0]["key"])
    run = visit.page.locator(f"#run-{row['runs'][0]['key']}")
    run.wait_for(state="visible")
    assert "Seed 0" in run.inner_text() and visit.page.input_value("#setting") == "1"
    visit.context.close()
    assert visit.complaints == []


def test_points_tell_by_pointer_and_by_keyboard(visit: Visit) -> None:
    visit.page.locator("#pareto").scroll_into_view_if_needed()
    box = visit.page.locator("#pareto .point").first.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = visit.page.locator("#tip")
    assert tip.is_visible() and "top-1" in tip.inner_text() and "seeds" in tip.inner_text()
    visit.page.mouse.move(5, 5)
    assert not tip.is_visible()
    visit.page.locator('#pareto .point[tabindex="0"]').focus()
    first = tip.inner_text()
    visit.page.keyboard.press("ArrowRight")
    assert tip.is_visible() and tip.inner_text() != first
    assert visit.page.locator('#pareto .point[tabindex="0"]').count() == 1
    visit.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_a_tap_tells_on_a_phone(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file, 390, has_touch=True, is_mobile=True)
    visit.page.locator("#pareto").scroll_into_view_if_needed()
    box = visit.page.locator("#pareto .point").first.bounding_box()
    visit.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = visit.page.locator("#tip")
    tip.wait_for(state="visible")
    place = tip.bounding_box()
    assert place["x"] >= 0 and place["x"] + place["width"] <= 390
    visit.context.close()


def test_the_legend_hides_and_shows(visit: Visit) -> None:
    everywhere = [visit.points(chart) for chart in ("pareto", "time", "curves")]
    visit.page.click("#legend button:has-text('hydra')")
    assert visit.page.get_attribute("#legend button:has-text('hydra')", "aria-pressed") == "false"
    assert [visit.points(chart) for chart in ("pareto", "time", "curves")] == [
        everywhere[0] - 1,
        everywhere[1] - 4,
        everywhere[2] - 1,
    ]
    visit.page.click("#legend-all")
    assert visit.points("pareto") == everywhere[0]


def test_one_colour_and_marker_everywhere(visit: Visit) -> None:
    seen = visit.page.evaluate(
        "['#legend', '#rows', '#pareto', '#curves'].map(where => [...document.querySelectorAll(where + ' path')]"
        ".filter(p => (p.closest('.item')?.dataset.candidate || p.closest('button')?.textContent) === 'stella')"
        ".map(p => p.style.fill))"
    )
    assert all(colours for colours in seen) and len({colour for colours in seen for colour in colours}) == 1


def test_theme_toggle(visit: Visit) -> None:
    def background() -> str:
        return visit.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    visit.page.click("#theme")
    assert visit.page.inner_text("#theme") == "Theme: light" and background() == light
    visit.page.click("#theme")
    assert visit.page.inner_text("#theme") == "Theme: dark" and background() != light
    visit.page.click("#theme")
    assert visit.page.inner_text("#theme") == "Theme: auto" and background() == light


def test_picks_follow_what_one_gives_up(visit: Visit) -> None:
    before = visit.page.locator(".picks .who").all_inner_texts()
    visit.page.click("#picks button:has-text('5 points') >> nth=-1")
    after = visit.page.locator(".picks .who").all_inner_texts()
    assert len(before) == 4 and before != after and "hydra" in after


def test_it_prints(visit: Visit, tmp_path: Path) -> None:
    visit.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
    visit.page.emulate_media(media="print", color_scheme="dark")
    assert not visit.page.locator("#controls").is_visible() and visit.page.locator("#pareto svg").is_visible()
    ink = visit.page.evaluate("getComputedStyle(document.body).color")
    assert sum(map(int, ink[4:-1].split(","))) < 200, "ink on paper is dark, whatever the screen"


def test_two_hundred_runs_stay_small(tmp_path: Path) -> None:
    store = write_store(tmp_path, seeds=range(10), seeds_of_others=range(4), epochs=300)
    contents = gather([store])
    assert len(contents.results.runs) >= 200
    assert len(render(contents).encode()) < 3_000_000


def test_speeds_come_from_ratios_and_absolutes_are_labelled(visit: Visit) -> None:
    heads = dict(
        visit.page.locator("#rows th button").evaluate_all("heads => heads.map(h => [h.dataset.sort, h.textContent])")
    )
    assert heads["latency"].endswith("alone") and heads["ips"].endswith("alone") and "× softmax" in heads["ratio"]
    assert "softmax's divided by the ratio taken side by side" in visit.page.inner_text("#pareto-caption")
    assert "softmax's divided by the ratio taken side by side" in visit.page.inner_text("#time-caption")
    assert "†" not in visit.page.inner_text("#rows")


def test_the_answer_and_its_counts_follow_the_setting(visit: Visit) -> None:
    before = [visit.page.inner_text(part) for part in ("#title", "#facts")]
    assert before[0].startswith("Take ") and "Trained from scratch" in before[1]
    visit.page.select_option("#setting", "1")
    after = [visit.page.inner_text(part) for part in ("#title", "#facts")]
    assert "Distilled from softmax" in after[1] and after != before
    assert visit.page.locator("#lead b").count() >= 1 and visit.page.locator("h1").count() == 1
