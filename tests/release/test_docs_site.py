"""The documentation site as its readers get it: `make docs` builds it and runs these."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shoal
import shoal.memory
import shoal.task
import shoal.train
from tests.support.pages.web import CHROMIUM

ROOT = Path(__file__).parents[2]
SITE = ROOT / os.environ.get("SHOAL_SITE", "")
#: What a browser fetches by itself. A link (`<a href>`) waits for its reader.
FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}

pytestmark = pytest.mark.skipif("SHOAL_SITE" not in os.environ, reason="run: make docs")


class Fetches(HTMLParser):
    """Collects the addresses that a page makes its browser fetch."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in FETCHED and "canonical" not in (values.get("rel") or ""):
            self.found.append(values.get(FETCHED[tag]) or "")


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


def test_pages_fetch_nothing_from_other_hosts() -> None:
    assert len(pages()) > 50
    fetched = [(page, address) for page in pages() for address in Fetches(page).found]
    assert len(fetched) > len(pages())
    other = [(page.name, to) for page, to in fetched if re.match(r"(\w+:)?//", to)]
    assert not other


def test_styles_fetch_nothing_from_other_hosts() -> None:
    styles = "\n".join(path.read_text() for path in SITE.rglob("*.css"))
    assert len(styles) > 10_000
    fetched = re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", styles)
    assert not [address for address in fetched if re.match(r"(https?:)?//", address)]


@pytest.mark.parametrize(
    "module", [shoal, shoal.train, shoal.memory, shoal.task], ids=lambda m: m.__name__
)
def test_every_public_name_has_its_reference(module: Any) -> None:
    page = (SITE / "reference" / module.__name__ / "index.html").read_text()
    headings = set(re.findall(r'<h2 id="([\w.]+)"', page))
    wanted = [f"{module.__name__}.{name}" for name in module.__all__]
    missing = [n for n in wanted if n not in headings and n not in ("shoal.memory", "shoal.task")]
    assert not missing


def test_the_search_finds_pages_and_public_names() -> None:
    titles = {part["title"] for part in json.loads(found_by_search())["docs"]}
    assert {"Tutorial", "Guide", "Changelog", "Security policy"} <= titles
    assert any("shoal.connect" in title for title in titles)


def found_by_search() -> str:
    return (SITE / "search" / "search_index.json").read_text()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_reader_searches_and_reads_in_the_dark(address: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(color_scheme="light").new_page()
        page.set_default_timeout(30_000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/")
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "default")
        page.get_by_title("Switch to dark mode").click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
        search = page.get_by_role("textbox", name="Search")
        search.click()
        search.press_sequentially("worker_groups")
        result = page.locator(".md-search-result__link").first
        expect(result).to_have_attribute("href", re.compile("reference|training"), timeout=30_000)
        result.click()
        page.wait_for_url(re.compile("/(reference|training)"))
        expect(page.locator("h1").first).to_be_visible()
        browser.close()
    assert len(asked) > 5
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
