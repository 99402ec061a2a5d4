"""People with a browser window, who fail a test if its console shows an error."""

from __future__ import annotations

import io
from typing import Any

from tests.support.pages import web
from tests.support.programs import ROOT
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

#: Far longer than anything takes on a loaded machine: every wait is for a condition.
PATIENCE_S = 100
SIGN_IN = "Sign in"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"


class Person:
    """A browser window that fails the test if its console shows an error."""

    def __init__(self, chromium: Any, pool: StandingPool, **options: Any) -> None:
        self.address = pool.told["web"]
        self.page = chromium.new_context(**options).new_page()
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            self.errors.append(message.text)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.address}/{path}")
        self.page.wait_for_selector("h1")

    def until(self, expression: str, what: str) -> None:
        """Wait until an expression is true; the pages' policy forbids the browser's own way."""
        wait_until(lambda: bool(self.page.evaluate(expression)), PATIENCE_S, what)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def close(self) -> None:
        self.page.context.close()
        assert not self.errors


def signed_in(chromium: Any, pool: StandingPool, **options: Any) -> Person:
    """A window that the pool's owner has signed in. A link is good for a minute only: again, if that
    was over before the page came."""
    person = Person(chromium, pool, **options)
    for _ in range(5):
        person.page.goto("about:blank")  # another # alone does not load the page
        person.open(f"#ticket={web.ticket(pool)}")
        if (
            person.page.locator("h1", has_text="Pool ").or_(signing_in(person)).inner_text()
            != SIGN_IN
        ):
            return person
    raise AssertionError(f"no sign-in link was good in time: {person.page.inner_text('main')}")


def signing_in(person: Person) -> Any:
    return person.page.locator("h1", has_text=SIGN_IN)


def enrol_by_qr(screen: Person, guest: Person, name: str) -> None:
    """Scan the code on a screen, and enrol. The code changes: again, if it was too old by then."""
    for _ in range(5):
        screen.page.locator("img").wait_for()
        guest.page.goto("about:blank")
        guest.page.goto(decode_qr(screen.page.screenshot()))
        guest.page.get_by_label("Your name").fill(name)
        guest.press("Enrol")
        asks = guest.page.get_by_role("button", name="Ask for a place")
        asks.or_(guest.page.get_by_role("alert")).wait_for()
        if asks.count():
            return
    raise AssertionError(f"no code was good in time: {guest.page.inner_text('main')}")


def decode_qr(png: bytes) -> str:
    import numpy
    import zxingcpp
    from PIL import Image

    found = zxingcpp.read_barcodes(numpy.asarray(Image.open(io.BytesIO(png)).convert("L")))
    assert found, "no QR code in the picture"
    return str(found[0].text)


def axe_findings(person: Person) -> list[tuple[str, list[str]]]:
    """What keeps somebody from using the open page, by axe-core; and whether it is too wide."""
    width, room = person.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    wide = [(f"{width} of {room} px", ["html"])] if width > room else []
    person.page.evaluate(AXE.read_text())
    found = person.page.evaluate("axe.run()")["violations"]
    return wide + [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found]
