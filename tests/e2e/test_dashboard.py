"""The dashboard in a real browser: enrol by QR, approve, draw, verify; reachable for everybody."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import web
from tests.support.pages.person import (
    AXE,
    PATIENCE_S,
    Person,
    axe_findings,
    decode_qr,
    enrol_by_qr,
    signed_in,
)  # fmt: skip
from tests.support.pages.web import STATIC
from tests.support.standing import StandingPool

BUNDLE_BYTES_MAX = 100_000
PAGES = ["", "tasks", "memory", "events", "people", "audit", "doctor", "device/0", "enrol"]

pytestmark = [web.needs_pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("pages"), listen=True, web=True) as made:
        yield made


def open_event(pool: StandingPool, title: str, *options: str) -> str:
    done = pool.run("event", "open", title, "--json", "--pool", pool.name, *options)
    assert done.code == 0, done.err
    return str(json.loads(done.out)["event"]["event"])


def test_the_bundle_is_small() -> None:
    sizes = {
        path.name: len(gzip.compress(path.read_bytes(), 9))
        for path in STATIC.iterdir()
        if path.suffix in (".js", ".css", ".html", ".svg")
    }
    assert sum(sizes.values()) < BUNDLE_BYTES_MAX, sizes
    licences = (STATIC / "licences.txt").read_text()
    assert all(name in licences for name in ("preact", "@preact/signals", "uplot"))


@web.needs_browser
def test_enrol_by_qr_approve_on_a_phone_draw_and_verify(chromium: Any, pool: StandingPool) -> None:
    event = open_event(pool, "GPU <b>hour</b>", "--approval", "hand")
    wall = signed_in(chromium, pool)
    wall.open(f"event/{event}/screen")
    wall.page.wait_for_selector("img")
    assert decode_qr(wall.page.screenshot()).startswith(f"{pool.told['web']}/enrol#{event}")

    guest = Person(chromium, pool, viewport={"width": 320, "height": 640})
    enrol_by_qr(wall, guest, "Eva <i>")
    guest.press("Ask for a place")
    guest.page.wait_for_selector("text=Keep your receipt")
    assert guest.page.get_by_role("heading", name="GPU <b>hour</b>").count() == 1

    phone = signed_in(chromium, pool, viewport={"width": 320, "height": 640}, color_scheme="dark")
    phone.open(f"event/{event}")
    phone.press("Approve eva-i")
    guest.page.wait_for_selector("text=approved")  # by the feed
    phone.press("Draw now")
    command = guest.page.locator("pre", has_text="shoal join ").inner_text()
    assert "shoal join " not in wall.page.inner_text("body")
    assert "shoal join " not in phone.page.inner_text("body")
    wall.page.wait_for_selector("text=Granted")
    guest.press("Check it here")
    guest.page.wait_for_selector("text=Your receipt is among its entries")
    key = str(pool.directory / "eva.pem")
    joined = pool.run(*command.split()[1:], "--as", "eva-laptop", SHOAL_IDENTITY=key)
    assert joined.code == 0, joined.err
    guest.page.wait_for_selector("text=The next program of eva-laptop gets it")  # by the feed
    for person in (wall, guest, phone):
        person.close()


@web.needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_wider_than_a_phone(
    chromium: Any, pool: StandingPool, scheme: str
) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is missing: python web/build.py --check")
    event = open_event(pool, f"axe {scheme}")
    person = signed_in(chromium, pool, viewport={"width": 320, "height": 700}, color_scheme=scheme)
    for path in [*PAGES, f"event/{event}", f"event/{event}/screen"]:
        person.open(path)
        person.until("document.querySelector('main').innerText.length > 20", f"/{path} is there")
        assert axe_findings(person) == [], path
    person.close()


@web.needs_browser
@pytest.mark.slow
def test_by_keyboard_alone(chromium: Any, pool: StandingPool) -> None:
    person = signed_in(chromium, pool)
    person.open("events")
    seen = []
    for _ in range(60):
        person.page.keyboard.press("Tab")
        name = person.page.evaluate(
            "(document.activeElement.name || document.activeElement.innerText)"
        )
        seen.append(name)
        if name == "title":
            person.page.keyboard.type("by keyboard")
            person.page.keyboard.press("Enter")
            break
    person.page.wait_for_selector("h1:has-text('by keyboard')")
    assert "Skip to the page" in seen[:2]
    person.close()


@web.needs_browser
@pytest.mark.slow
def test_dns_rebinding(chromium: Any, pool: StandingPool) -> None:
    """A page whose name comes to mean this machine sees nothing, whatever the browser thinks."""
    port = pool.told["web"].rpartition(":")[2]
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    answer = page.goto(f"http://evil.example:{port}/")
    assert answer.status == 421
    read = """fetch("/v1/events").then(async (r) => [r.status, (await r.json()).title])"""
    assert page.evaluate(read) == [421, "This is not the address of this server"]
    page.close()


@web.needs_browser
@pytest.mark.slow
def test_a_hostile_page(chromium: Any, pool: StandingPool, tmp_path: Path) -> None:
    """A page of another origin can neither post nor frame nor read for a signed-in person."""
    target = pool.told["web"]
    page = f"""<!doctype html><iframe src="{target}/"></iframe>
      <form id=f method=post action="{target}/v1/events" enctype="text/plain">
      <input name='{{"title":"evil","places":1,"x":"' value='"}}'></form>
      <script>window.told = []; const note = (r) => told.push(r);
      fetch("{target}/v1/events", {{method: "POST", mode: "no-cors", credentials: "include",
        body: '{{"title":"evil","places":1}}'}}).then(() => note("sent"), () => note("refused"));
      fetch("{target}/v1/events", {{credentials: "include"}})
        .then(() => note("read"), () => note("refused"));</script>"""

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    person = signed_in(chromium, pool)
    person.page.goto(f"http://localhost:{server.server_port}/")
    person.page.wait_for_function("told.length == 2")
    assert "read" not in person.page.evaluate("told")
    frames = [f.url for f in person.page.frames[1:]]
    assert not any(url.startswith(target) for url in frames), frames
    person.page.evaluate("document.getElementById('f').submit()")
    person.page.wait_for_url(f"{target}/**")
    listed = json.loads(pool.run("event", "list", "--json", "--pool", pool.name).out)
    assert "evil" not in {e["title"] for e in listed}
    server.shutdown()
