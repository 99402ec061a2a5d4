"""People with a browser window, who fail a test if its console shows an error."""

from __future__ import annotations

import io
from typing import Any

from tests.support.pages import web
from tests.support.programs import ROOT
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"


class Person:
    """A browser window that fails the test if its console shows an error."""

    def __init__(self, chromium: Any, pool: StandingPool, **options: Any) -> None:
        self.address = pool.told["web"]
        self.page = chromium.new_context(**options).new_page()
        self.page.set_default_timeout(30_000)
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
        wait_until(lambda: bool(self.page.evaluate(expression)), 30, what)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def close(self) -> None:
        self.page.context.close()
        assert not self.errors


def signed_in(chromium: Any, pool: StandingPool, **options: Any) -> Person:
    person = Person(chromium, pool, **options)
    person.open(f"#ticket={web.ticket(pool)}")
    person.page.wait_for_selector("text=Pool ")
    return person


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
