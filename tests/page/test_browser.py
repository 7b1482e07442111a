"""The page in a real browser: it is quiet, asks only its own server, and does what its controls say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.comparison.browsing import CHROMIUM, NEEDS_BROWSER

pytestmark = NEEDS_BROWSER
DROP = """([name, text]) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name));
  window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visitor:
    """The page with what it complained of and asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light", **context: Any) -> None:
        viewport = {"width": width, "height": 900}
        self.address, self.complaints, self.requests = address, [], []
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, **context)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.locator(".scores li").nth(9).wait_for()
        self.page.locator("#colours canvas").nth(1).wait_for()

    def drawn(self, side: int = 0) -> str:
        """The pixels of a side's map."""
        return self.page.locator("#sides canvas").nth(side).evaluate("canvas => canvas.toDataURL()")

    def point(self, x: float, y: float, side: int = 0) -> None:
        box = self.page.locator("#sides canvas").nth(side).bounding_box()
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def changes(self, act: Any, side: int = 0) -> float:
        """Do something and wait until a side's map is another; how many seconds that took."""
        before, begin = self.drawn(side), time.perf_counter()
        act()
        while self.drawn(side) == before:
            assert time.perf_counter() - begin < 10, "nothing changed"
            time.sleep(0.005)
        return time.perf_counter() - begin

    def slide(self, name: str, value: int) -> None:
        self.page.locator(f"#{name}").fill(str(value))

    def leave(self, complaints: int = 0) -> None:
        self.context.close()
        assert len(self.complaints) == complaints, self.complaints
        foreign = [url for url in self.requests if not url.startswith((self.address, "data:"))]
        assert not foreign and len(self.requests) > 10


@pytest.fixture
def visitor(browser: Any, address: str) -> Visitor:
    return Visitor(browser, address)


def test_drop_hover_sliders_and_latency(visitor: Visitor, tmp_path: Path) -> None:
    import base64

    page = visitor.page
    # Maps follow the pointer, on both sides, whichever it is over.
    visitor.changes(lambda: visitor.point(0.1, 0.1), side=1)
    visitor.changes(lambda: visitor.point(0.9, 0.6, side=1), side=0)
    rows = [url for url in visitor.requests if "/api/row" in url]
    assert any("query=0.875%2C0.625" in url for url in rows), rows[-2:]
    # A patch that was there before is drawn without being asked for again.
    visitor.changes(lambda: visitor.point(0.1, 0.1))
    assert len([url for url in visitor.requests if "/api/row" in url]) == len(rows)
    # Layer, head, what is shown, and whose query.
    visitor.changes(lambda: visitor.slide("layer", 0))
    assert "blocks.0.attn" in page.inner_text(".about-map >> nth=0") and page.inner_text("#layer-out") == "0 of 1"
    visitor.changes(lambda: visitor.slide("head", 2))
    assert page.inner_text("#head-out") == "2 of 2"
    visitor.changes(lambda: page.click("text=Rollout"))
    assert page.locator("#head").is_disabled()
    visitor.changes(lambda: page.click("text=Similarity"))
    visitor.changes(lambda: page.click("text=Attention"))
    visitor.changes(lambda: page.click("text=Class token"))
    assert "stella" in page.inner_text(".about-map >> nth=1") and "total variation" in page.inner_text("#apart")
    # A picture is dropped; a text that is called one is refused, and the page goes on.
    file = tmp_path / "red.png"
    Image.effect_mandelbrot((90, 60), (-2, -1.2, 1, 1.2), 60).save(file)
    content = base64.b64encode(file.read_bytes()).decode()
    visitor.changes(lambda: page.evaluate(DROP, ["red.png", content]))
    assert page.locator("#samples [aria-pressed=true]").count() == 0
    page.evaluate(DROP, ["photo.jpg", base64.b64encode(b"only words").decode()])
    page.locator("#refusal", has_text="none of JPEG").wait_for()
    visitor.changes(lambda: page.click("#samples button >> nth=1"))
    assert not page.locator("#refusal").is_visible()
    # Another plan, one that does not exist, and what it says.
    page.fill(".wish input >> nth=3", "xca")
    page.press(".wish input >> nth=3", "Enter")
    page.locator(".about-map", has_text="xca has no map").wait_for()
    page.fill(".wish input >> nth=3", "nonsense")
    page.press(".wish input >> nth=3", "Enter")
    page.locator(".wrong", has_text="unknown plan").wait_for()
    page.fill(".wish input >> nth=3", "stella")
    page.press(".wish input >> nth=3", "Enter")
    # Another resolution: other grids, and both are timed there.
    visitor.slide("size", 0)
    page.locator(".about-map", has_text="2×2 patches").nth(1).wait_for()
    page.locator("#times .big", has_text="ms").nth(1).wait_for()
    assert page.inner_text("#size-out") == "32 px"
    page.click("#measure")
    page.locator("#cancel").click()
    page.locator("#cancel").wait_for(state="hidden")
    visitor.leave(complaints=2)  # the browser tells of the two refusals


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_themes_and_a_phone(browser: Any, address: str, width: int, scheme: str) -> None:
    visitor = Visitor(browser, address, width, scheme, has_touch=True)
    page = visitor.page

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[4:-1].split(",")))

    assert (brightness() < 200) == (scheme == "dark")
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    for _ in range(2 if scheme == "light" else 1):
        page.click("#theme")
    assert (brightness() < 200) == (scheme == "light")
    page.locator("#sides canvas").nth(1).scroll_into_view_if_needed()
    box = page.locator("#sides canvas").nth(1).bounding_box()
    visitor.changes(lambda: page.touchscreen.tap(box["x"] + 9, box["y"] + 9))
    visitor.changes(lambda: page.locator("#sides canvas").first.press("ArrowRight"))
    visitor.leave()
