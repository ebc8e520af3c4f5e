"""The page in Chromium: clicks, keys, drags, uploads, and what is displayed."""

import io
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.browse import redirection
from tests.server.conftest import served

pytestmark = pytest.mark.slow
pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")


class Visit:
    """An open page, its errors and the hosts it contacts."""

    def __init__(self, browser: object, address: str, **settings: object) -> None:
        self.address = address
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def open(self, hash_: str = "") -> "Visit":
        self.page.goto(f"{self.address}/{hash_}")
        self.page.wait_for_selector("#grid .tile", state="attached")
        return self

    def until(self, expression: str) -> None:
        """Wait until an expression is true; the page's policy forbids Playwright's own wait_for_function."""
        for _ in range(300):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(100)
        pytest.fail(f"never true: {expression}")

    def on_map(self, number: int) -> tuple[float, float]:
        """Position of an image on the screen."""
        box = self.page.locator("#over").bounding_box()
        x, y = self.page.evaluate(f"onScreen({number})")
        return box["x"] + x, box["y"] + y

    def pixels(self, selector: str) -> np.ndarray:
        """A screenshot of an element (H, W, 3)."""
        return np.asarray(Image.open(io.BytesIO(self.page.locator(selector).screenshot())).convert("RGB")).astype(int)


@pytest.fixture(scope="module")
def usual_visit(chromium: object) -> Iterator[Visit]:
    """The tab of all tests that need no particular screen or theme."""
    usual = Visit(chromium, "")
    yield usual
    usual.context.close()


@pytest.fixture
def visit(chromium: object, usual_visit: Visit, served_run: str) -> Iterator[Callable[..., Visit]]:
    """`visit(...)` opens the page of a trained run; afterwards there must be no errors and no other hosts."""
    made = []

    def opened(address: str = served_run, **settings: object) -> Visit:
        made.append(Visit(chromium, address, **settings) if settings else usual_visit)
        made[-1].address = address
        return made[-1].open()

    usual_visit.errors.clear()
    usual_visit.hosts.clear()
    yield opened
    for each in made:
        if each is usual_visit:
            each.page.evaluate("localStorage.clear()")
            each.page.goto("about:blank")
        else:
            each.context.close()
        assert each.errors == []
        assert each.hosts - {""} == {each.address.split("/")[2]}  # "": pictures that the page holds itself


@pytest.fixture(scope="session")
def own_features(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page of vectors without images, with hostile class names."""
    names = np.array(["<img src=x onerror=alert(1)>", "plain", "caf\u00e9 & \u732b", "x" * 300, *map(str, range(10))])
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(14), 40 - np.arange(14))  # the first are the most frequent
    vectors = 3 * random.normal(size=(14, 8))[labels] + random.normal(size=(len(labels), 8))
    folder = tmp_path_factory.mktemp("own")
    np.savez(folder / "own.npz", vectors=vectors, labels=labels, class_names=names)
    with served(folder / "own.npz") as address:
        yield address


def test_vectors_without_labels(visit: Callable[..., Visit], tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", vectors=np.random.default_rng(0).normal(size=(30, 8)))
    with served(tmp_path / "plain.npz") as address:
        page = visit(address).page
        assert "No errors are counted: 30 of 30 images without a label." in page.locator("#chosen").inner_text()
        assert page.locator("#order option:disabled").count() == 2
        page.click("#grid .tile >> nth=5")
        page.wait_for_selector("#nearest .tile")
        assert page.locator("#nearest .sign").count() == 0
        assert "same class" not in page.locator("#chosen").inner_text()
        page.goto(f"{address}/#view=confusions")
        page.wait_for_selector("#confusions-body :text('No classes are confused: 30 of 30 images without a label.')")
        page.goto(f"{address}/#order=rank")  # a stale address
        page.wait_for_selector("#notice:has-text('No errors are counted')")
        assert page.locator("#grid .tile").count() == 30


def test_clicks_and_history(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit().page
    page.click("#grid .tile >> nth=5")
    page.wait_for_selector("#nearest .tile")
    assert page.locator(".query .path").inner_text().endswith("row 5")
    assert page.locator("#nearest .tile").count() == 24
    signs = page.locator("#nearest .sign").all_inner_texts()
    judged = page.eval_on_selector_all("#nearest .tile", "tiles => tiles.map(t => t.classList.contains('right'))")
    assert [sign == "✓" for sign in signs] == judged
    shown = [float(value) for value in page.locator("#nearest .value").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    second = page.locator("#nearest .tile >> nth=1").get_attribute("data-number")
    page.click("#nearest .tile >> nth=1")
    page.wait_for_selector(f".query .path:has-text('row {second}')")
    assert page.locator(".trail .step").count() == 1
    page.go_back()
    page.wait_for_selector(".query .path:has-text('row 5')")
    page.go_forward()
    page.wait_for_selector(f".query .path:has-text('row {second}')")
    page.click(".trail button[aria-label=Back]")
    page.wait_for_selector(".query .path:has-text('row 5')")
    page.reload()
    page.wait_for_selector(".query .path:has-text('row 5')")


def test_filters_and_pages(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.click("#pages button:has-text('Next')")
    page.wait_for_selector("text=page 2 of")
    page.keyboard.press("/")
    page.keyboard.type("serif-bold")
    titles = "[...document.querySelectorAll('#grid .tile')].map(tile => tile.title)"
    seen.until(f"{titles}.length > 0 && {titles}.every(title => title.includes('Serif-Bold'))")
    page.locator("#text").fill("nothing is called so")
    page.wait_for_selector("text=Nothing matches")
    page.locator("#text").fill("")
    page.wait_for_selector("#grid .tile")
    page.click("#grid .tile >> nth=0")
    page.click(".query .link")
    page.wait_for_selector("#class:visible")
    name = page.locator("#class-name").inner_text()
    seen.until(f"{titles}.length > 0 && {titles}.every(title => title.startsWith({name!r}))")
    page.click("#class button")
    page.wait_for_selector("#class", state="hidden")
    seen.until(f"!{titles}.every(title => title.startsWith({name!r}))")


def test_worst_first(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit()
    seen.until("jobs.failures?.state === 'done'")
    page = seen.page
    page.keyboard.press("f")
    page.wait_for_selector("#grid .value")
    ranks = [int(text.strip("#> ")) for text in page.locator("#grid .value").all_inner_texts() if text != "alone"]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > 1
    page.select_option("#order", "fraction")
    page.wait_for_selector("#grid .value:has-text('%')")
    fractions = [int(text.strip(" %")) for text in page.locator("#grid .value").all_inner_texts()]
    assert fractions == sorted(fractions, reverse=True)


def test_confusions_lead_to_images(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit().page
    page.click("nav button[data-go=confusions]")
    page.wait_for_selector(".pair")
    fractions = [float(text.split()[0]) for text in page.locator(".pair .fraction b").all_inner_texts()]
    assert fractions == sorted(fractions, reverse=True)
    page.click(".pair >> nth=0")
    page.wait_for_selector(".mistake")
    first = page.locator(".mistake >> nth=0")
    names = first.locator(".caption .name").all_inner_texts()
    assert names[0] != names[1]
    first.locator(".tile >> nth=0").click()
    page.wait_for_selector("#nearest .tile")
    page.click("button:has-text('All pairs')")
    page.wait_for_selector(".pair")


def test_upload_finds_itself(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit()
    page = seen.page
    source = page.locator("#grid .tile >> nth=7").get_attribute("data-number")
    picture = page.evaluate(
        f"fetch(thumbnail({source}, 512)).then(a => a.arrayBuffer()).then(b => Array.from(new Uint8Array(b)))"
    )
    (tmp_path / "photo.png").write_bytes(bytes(picture))
    asked = "event => { event.preventDefault(); window.asked = true; }"  # in place of the system's own dialog
    page.evaluate(f"$('file').addEventListener('click', {asked})")
    page.keyboard.press("u")
    seen.until("window.asked")
    page.set_input_files("#file", tmp_path / "photo.png")
    page.wait_for_selector("text=Your image")
    assert page.locator("#nearest .tile >> nth=0").get_attribute("data-number") == source
    assert page.locator("#nearest .tile >> nth=0").locator(".value").inner_text() == "1.00"
    assert page.locator("#nearest .sign").count() == 0
    assert page.locator("#subgraph li").count() > 0
    assert "trained" not in page.locator("#subgraph").inner_text()  # nobody knows its class
    chances = [float(text.strip("\xa0%")) for text in page.locator("#votes li > .quiet").all_inner_texts()]
    assert chances == sorted(chances, reverse=True)
    assert 30 < sum(chances) < 100
    assert "before `proxygml calibrate`" in page.locator("#votes").inner_text()
    page.click("#nearest .tile >> nth=2")
    page.wait_for_selector(".query .path:has-text('row')")
    page.go_back()
    page.wait_for_selector("text=Your image")


def test_invalid_uploads_are_one_line(chromium: object, served_run: str, tmp_path: Path) -> None:
    from tests.server.test_server import bomb

    seen = Visit(chromium, served_run).open()
    for name, contents, message in [
        ("letter.pdf", b"%PDF-1.4 this is no image", "letter.pdf: not a readable image"),
        ("bomb.png", bomb(60_000), "bomb.png: the image has more than 200 million pixels"),
        ("empty.jpg", b"", "empty.jpg: expected an image, got 0 bytes"),
        ("huge.jpg", b"\xff\xd8" + bytes(64 * 2**20), "huge.jpg is larger than 64 MB"),
    ]:
        (tmp_path / name).write_bytes(contents)
        seen.page.set_input_files("#file", tmp_path / name)
        seen.page.wait_for_selector(f"#notice:has-text('{message}')")
    seen.page.keyboard.press("Escape")
    seen.page.wait_for_selector("#notice", state="hidden")
    seen.page.click("#grid .tile >> nth=0")
    seen.page.wait_for_selector("#nearest .tile")
    # Chromium itself remarks that an upload was refused; nothing else may have gone wrong.
    assert {error for error in seen.errors if "415" not in error} == set()
    seen.context.close()


def test_map_moves_zooms_and_selects(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit()
    page = seen.page
    page.keyboard.press("m")
    seen.until("places !== null && frame === 0")
    blank = (seen.pixels("#stage") == 255).all(axis=2).mean()
    assert blank < 0.995  # something is drawn
    x, y = seen.on_map(10)
    page.mouse.move(x, y)
    page.wait_for_selector("#tip:visible")
    pointed = page.evaluate("pointed")
    distance = np.hypot(*np.subtract(seen.on_map(pointed), (x, y)))
    assert distance < 1
    assert f"row {pointed}" in page.locator("#tip").inner_text()
    page.wait_for_selector("#tip img")
    page.mouse.wheel(0, -500)
    seen.until("view.zoom > 2")
    np.testing.assert_allclose(seen.on_map(pointed), (x, y), atol=2)  # what is under the pointer stays there
    page.mouse.down()
    page.mouse.move(x + 80, y + 50, steps=5)
    page.mouse.up()
    np.testing.assert_allclose(seen.on_map(pointed), (x + 80, y + 50), atol=2)
    assert page.evaluate("state.image") is None  # dragging chooses nothing
    page.mouse.click(*seen.on_map(pointed))
    page.wait_for_selector("#nearest .tile")
    assert page.evaluate("state.image") == pointed
    page.click("#zoom-all")
    assert page.evaluate("view.zoom") == 1


def test_links_are_drawn_to_proxies(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit()
    page = seen.page
    tile = page.locator("#grid .tile >> nth=16")  # of the second class, since the first is held out
    number = tile.get_attribute("data-number")
    tile.click()
    page.wait_for_selector("#nearest .tile")
    page.keyboard.press("m")
    seen.until("places !== null && frame === 0")
    graph = page.evaluate("found.subgraph")
    per_class = page.evaluate("space.proxies.per_class")
    assert len(graph["linked"]) == page.evaluate("space.proxies.links")
    own = [proxy for proxy in graph["linked"] if proxy // per_class == graph["own_class"]]
    assert len(own) == per_class
    with_links = seen.pixels("#stage")
    page.uncheck("#proxies")
    seen.until("frame === 0")  # what was asked for is drawn
    without = seen.pixels("#stage")
    page.check("#proxies")
    # The middle of the line to a proxy of its own class is drawn only while proxies are.
    box = page.locator("#stage").bounding_box()
    start, end = (page.evaluate(f"onScreen({point})") for point in (number, f"space.images + {own[0]}"))
    middle = np.add(start, end) / 2 + 1  # the frame of the stage
    x, y = middle.round().astype(int)
    assert 0 < x < box["width"]
    assert (with_links[y - 3 : y + 4, x - 3 : x + 4] != without[y - 3 : y + 4, x - 3 : x + 4]).any()
    assert "★" in page.locator("#subgraph li.own").inner_text()


def test_only_the_strongest_links_are_drawn(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.click("#grid .tile >> nth=0")
    seen.page.wait_for_selector("#nearest .tile")
    seen.page.keyboard.press("m")
    seen.until("places !== null && frame === 0")
    drawn = seen.page.evaluate(
        "(() => { let lines = 0; const canvas = CanvasRenderingContext2D.prototype, move = canvas.moveTo;"
        "canvas.moveTo = function (...at) { lines += 1; move.apply(this, at); };"
        "const linked = [...Array(60).keys()]; Object.assign(found.subgraph, { linked, cosines: linked });"
        "drawOver(); canvas.moveTo = move; return lines; })()"
    )
    assert drawn == seen.page.evaluate("LINES") == 20


def test_zoom_has_limits(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.keyboard.press("m")
    seen.until("places !== null && frame === 0")
    seen.page.evaluate("zoomBy(0.01)")
    assert seen.page.evaluate("view.zoom") == 1
    seen.page.evaluate("moveBy(9, -9)")
    assert seen.page.evaluate("[view.x, view.y]") == [0.5, -0.5]
    seen.page.evaluate("showAll()")
    in_sight = (
        "[...classes.keys()].some(i => { const [x, y] = onScreen(i);"
        "return x > 0 && y > 0 && x < $('stage').clientWidth && y < $('stage').clientHeight; })"
    )
    for _ in range(40):
        seen.page.evaluate("zoomBy(1.6)")
        assert seen.page.evaluate(in_sight)
    assert 1 < seen.page.evaluate("view.zoom") <= 200


def cielab(color: str) -> np.ndarray:
    """#rrggbb as L, a, b."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1095, 0.8727]]) @ linear
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_ten_classes_have_colors_and_others_by_click(
    visit: Callable[..., Visit], own_features: str, tmp_path: Path
) -> None:
    seen = visit(own_features)
    page = seen.page
    for theme in ("light", "dark"):
        page.evaluate(f"setTheme('{theme}')")
        names = [f"class-{number}" for number in range(10)] + ["class-rest", "card"]
        shown = [page.evaluate("css", name) for name in names]
        colors = np.array([cielab(each) for each in shown])
        distances = np.linalg.norm(colors[:, None] - colors, axis=2) + 99 * np.eye(len(colors))
        assert distances[:10].min() > 25  # 2.3 is just noticeable
    page.click("#grid .tile >> nth=0")
    page.keyboard.press("m")
    seen.until("colors !== null && frame === 0")
    assert page.evaluate("slots") == list(range(10))
    assert page.locator("#legend button[aria-pressed=true]").count() == 10
    assert "4 other classes" in page.locator("#legend").inner_text()
    gray = page.evaluate("colors[classes.indexOf(13)]")
    last = page.evaluate("classes.indexOf(12)")
    assert page.evaluate(f"colors[{last}]") == gray
    page.evaluate(f"choose({last})")
    page.wait_for_selector(f".query .path:has-text('row {last}')")
    page.click(".dot-button")
    assert page.evaluate(f"colors[{last}]") != gray
    assert page.evaluate("slots") == [*range(9), 12]  # in place of the last one
    page.click("#legend button >> nth=0")
    assert page.evaluate("slots") == [None, *range(1, 9), 12]
    assert page.evaluate("colors[0]") == gray


def test_full_size(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.click("#grid .tile >> nth=4")
    page.wait_for_selector("#nearest .tile")
    page.click(".enlarge")
    seen.until("$('full').open && $('full').querySelector('img').naturalWidth > 0")
    assert "/page/thumbnails/4?side=2048" in page.locator("#full img").get_attribute("src")
    page.keyboard.press("Escape")
    seen.until("!$('full').open")
    assert page.evaluate("state.image") == 4
    page.keyboard.press("z")
    page.click("#full")
    assert not page.evaluate("$('full').open")


def test_result_is_above_the_fold_on_a_phone(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit(viewport={"width": 390, "height": 664}, has_touch=True)  # with the bars of its browser
    page = seen.page
    in_sight = "$('nearest').querySelector('.tile').getBoundingClientRect().bottom < innerHeight"
    page.tap("#grid .tile >> nth=2")
    page.wait_for_selector("#nearest .tile")
    assert page.evaluate(in_sight)
    page.tap("nav button[data-go=map]")
    seen.until("places !== null && frame === 0")
    page.evaluate("choose(3)")
    page.wait_for_selector(".query .path:has-text('row 3')")
    assert page.evaluate(in_sight)
    Image.new("RGB", (50, 50)).save(tmp_path / "photo.png")
    page.set_input_files("#file", tmp_path / "photo.png")
    page.wait_for_selector("#votes")
    assert page.evaluate("$('votes').getBoundingClientRect().bottom < innerHeight")


def test_tsne_in_the_background_can_be_stopped(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.keyboard.press("m")
    seen.until("places !== null")
    before = page.evaluate("Array.from(places.slice(0, 20))")
    page.select_option("#layout", "tsne")
    page.wait_for_selector("#drawing progress")
    page.evaluate("window.stop = document.querySelector('#drawing button')")
    page.evaluate("jobs.tsne.done += 1, showProgress()")
    assert page.evaluate("stop.isConnected")  # progress leaves the button in its place, so that a click is heard
    page.evaluate("stop.click()")
    seen.until("jobs.tsne.state === 'idle'")
    assert page.locator("#layout").input_value() == "pca"
    page.select_option("#layout", "tsne")
    page.wait_for_selector("#drawing progress")
    page.click("nav button[data-go=images]")
    page.click("#grid .tile >> nth=1")  # the server answers meanwhile
    page.wait_for_selector("#nearest .tile")
    seen.until("jobs.tsne.state === 'done'")  # while another view is open
    page.keyboard.press("m")
    seen.until("layout === 'tsne'")
    assert page.evaluate("Array.from(places.slice(0, 20))") != before


def test_keyboard(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.dataset.number")
    assert focused == "1"
    page.keyboard.press("Enter")
    page.wait_for_selector("#nearest .tile")
    assert page.evaluate("state.image") == 1
    page.keyboard.press("Escape")
    assert page.evaluate("state.image") is None
    page.keyboard.press("Enter")
    page.wait_for_selector("#nearest .tile")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    place = page.evaluate("[...document.querySelectorAll('#nearest .tile')].indexOf(document.activeElement)")
    columns = page.evaluate(
        "getComputedStyle(document.getElementById('nearest')).gridTemplateColumns.split(' ').length"
    )
    assert place == columns
    number = page.evaluate("document.activeElement.dataset.number")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus is seen
    page.keyboard.press("Enter")
    page.wait_for_selector(f".query .path:has-text('row {number}')")
    page.keyboard.press("b")
    page.wait_for_selector(".query .path:has-text('row 1')")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    assert page.evaluate("state.image") == 1  # Escape closed the help alone
    page.keyboard.press("c")
    page.wait_for_selector(".pair")
    page.keyboard.press("m")
    seen.until("places !== null")
    page.focus("#over")
    page.keyboard.press("+")
    assert page.evaluate("view.zoom") > 1
    before = page.evaluate("view.x")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("view.x") > before
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    seen.until("state.image !== 1")


def test_narrow_screen_needs_no_sideways_scrolling(visit: Callable[..., Visit], tmp_path: Path) -> None:
    seen = visit(viewport={"width": 360, "height": 740}, has_touch=True)
    page = seen.page

    def fits(name: str) -> None:
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && "
            "e.getBoundingClientRect().right > 361 && !e.closest('.walk')).map(e => e.className || e.tagName)"
        )
        assert wide == []

    fits("images")
    page.tap("#grid .tile >> nth=2")
    page.wait_for_selector("#nearest .tile")
    assert not page.locator("#grid").is_visible()
    fits("chosen")
    page.tap("text=✕ Close")
    page.wait_for_selector("#grid:visible")
    page.tap("#grid .tile >> nth=2")
    page.wait_for_selector("#nearest .tile")
    page.tap("nav button[data-go=confusions]")  # which the chosen one does not cover
    page.wait_for_selector(".pair")
    fits("confusions")
    page.tap("nav button[data-go=map]")
    seen.until("places !== null")
    fits("map")


def test_dark_mode_is_remembered(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit(color_scheme="dark").page
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    dark = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) != dark
    page.reload()
    page.wait_for_selector("#grid .tile")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert visit(color_scheme="light").page.evaluate("document.documentElement.dataset.theme") == "light"


def test_contrast_in_both_themes(visit: Callable[..., Visit]) -> None:
    """Contrast of text is at least 4.5 to 1, as WCAG requires."""
    page = visit().page

    def luminance(color: str) -> float:
        channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for theme in ("light", "dark"):
        page.evaluate(f"setTheme('{theme}')")
        names = ("paper", "card", "ink", "soft", "accent", "accent-ink", "right", "wrong", "well")
        read = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
        ink = {name: luminance(page.evaluate(read, name)) for name in names}
        for text, ground in [
            *[(text, ground) for text in ("ink", "soft") for ground in ("paper", "card", "well")],
            *[("accent-ink", "accent"), ("wrong", "card")],
        ]:
            high, low = sorted((ink[text], ink[ground]), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, text, ground)


def test_controls_have_names(visit: Callable[..., Visit]) -> None:
    seen = visit()
    page = seen.page
    page.click("#grid .tile >> nth=0")
    page.wait_for_selector("#nearest .tile")
    for view in ("i", "c", "m"):
        page.keyboard.press(view)
        page.wait_for_timeout(300)
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, select, input, canvas[tabindex]')]"
            ".filter(e => e.checkVisibility() && !e.getAttribute('aria-label') && !e.innerText?.trim())"
            ".filter(e => !e.labels?.length).map(e => e.outerHTML)"
        )
        assert unnamed == []


def test_layout_does_not_shift(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.evaluate(
        "window.shifts = 0; new PerformanceObserver(list => { for (const e of list.getEntries()) "
        "if (!e.hadRecentInput) window.shifts += e.value; }).observe({type: 'layout-shift', buffered: true})"
    )
    seen.page.click("#grid .tile >> nth=0")
    seen.page.wait_for_selector("#nearest .tile")
    seen.page.wait_for_timeout(800)
    assert seen.page.evaluate("window.shifts") < 0.05


def test_class_names_are_not_markup(visit: Callable[..., Visit], own_features: str, tmp_path: Path) -> None:
    seen = visit(own_features)
    page = seen.page
    assert page.locator("#upload").is_disabled()
    assert page.locator("#grid .nameplate >> nth=0").inner_text().split("\n") == [
        "<img src=x onerror=alert(1)>",
        "row 0",
    ]
    page.click("#grid .tile >> nth=0")
    page.wait_for_selector("#nearest .tile")
    assert page.locator("main img").count() == 0
    values = [float(text) for text in page.locator("#nearest .value").all_inner_texts()]
    assert values == sorted(values)  # distances: these vectors are not of unit length
    page.keyboard.press("m")
    seen.until("places !== null")
    x, y = seen.on_map(3)
    page.mouse.move(x, y)
    page.wait_for_selector("#tip:visible")
    page.keyboard.press("c")
    page.wait_for_selector(".pair, #confusions-body p")


def test_invalid_address_is_one_line(visit: Callable[..., Visit], chromium: object) -> None:
    seen = visit()
    seen.page.evaluate("location.hash = '#view=nothing&image=abc&page=-3&pair=1&upload=7'")
    seen.page.wait_for_selector("#notice:has-text('that upload is gone')")
    assert seen.page.evaluate("state.view") == "images"


def test_private_file_leads_to_the_page_with_its_token(chromium: object, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", vectors=np.eye(4), labels=np.arange(4))
    with served(tmp_path / "own.npz", token="secret") as address:
        page = chromium.new_page()
        page.goto(redirection(f"{address}/?token=secret", tmp_path))
        page.wait_for_selector("#grid .tile")
        assert "token" not in page.url
        page.close()


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(3000, 20))
    np.savez(tmp_path / "own.npz", vectors=vectors, labels=np.arange(3000) % 9)
    command = [sys.executable, "-m", "proxygml", "browse", tmp_path / "own.npz", "--port", "0", "--no-open"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        line = process.stdout.readline()
        assert line.startswith("3,000 vectors of 9 classes: http://127.0.0.1:")
        address = re.search(r"http://\S+", line)[0]
        with urllib.request.urlopen(urllib.request.Request(f"{address}/page/jobs/tsne", method="POST")) as answer:
            assert b"running" in answer.read()
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
        rest, errors = process.communicate(timeout=120)  # which also waits for every process that writes there
    assert (process.returncode, rest, errors) == (130, "", "stopped\n")
