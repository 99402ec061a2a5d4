"""The dashboard under load: how soon browsers see a change, and what that costs the head.

Feeds stay connected while an event changes again and again. Each change is timed from its request to
the moment at which every feed has heard of it and at which a page in a real browser shows it.

    python -m bench.web                     # 200 feeds, 100 changes
    python -m bench.web --quick

| figure | target |
|---|---|
| change seen by a feed, p99 | 1 s |
| change on the page of a real browser, p99 | 1 s |
| the head's latest beat during all of it | 100 ms late |
| memory of the web process after it, beyond that before it | 64 MiB |
| first view on a phone profile: CPU 4 times slower, 1.6 Mbit/s, 150 ms | 1 s |

Exit code 1: a figure misses its target. The table names it.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.pages import web
from tests.support.pages.person import Person, signed_in
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool

from shoal.pool.client import head_connection
from shoal.pool.wire import messages

MiB = 2**20
BEAT_S = 0.1  # between looks at the head
SETTLE_S = 30.0


#: By the page's own clock, when the devices are painted: the driver's is slowed down with the page.
NOTE_FIRST_VIEW = """
new MutationObserver((_, watch) => {
  if (!document.querySelector(".grid a")) return;
  watch.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => (window.firstView = performance.now())));
}).observe(document, { childList: true, subtree: true });
"""


@dataclass
class Feeds:
    """Connections to the feed, read by one thread. `heard` is when each heard of the latest change."""

    host: str
    cookie: str
    count: int
    topic: str = ""
    heard: dict[int, float] = field(default_factory=dict)
    connected: int = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._read(number) for number in range(self.count)))

    async def _read(self, number: int) -> None:
        name, _, port = self.host.rpartition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        writer.write(
            f"GET /v1/feed HTTP/1.1\r\nHost: {self.host}\r\nCookie: {self.cookie}\r\n\r\n".encode()
        )
        self.connected += 1
        while line := await reader.readline():
            if self.topic and self.topic.encode() in line:
                self.heard.setdefault(number, time.monotonic())


class Beats(threading.Thread):
    """Asks the head for little, again and again, and keeps the longest that it took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.late_s = 0.0
        self.stopping = threading.Event()

    def run(self) -> None:
        with head_connection.Connection(self.url, 30) as connection:
            while not self.stopping.wait(BEAT_S):
                begin = time.monotonic()
                connection.ask(messages.Describe(), 30)
                self.late_s = max(self.late_s, time.monotonic() - begin)


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]


def web_bytes(pool: StandingPool) -> int:
    """Memory of the web process."""
    pid = next(
        p
        for p in processes.children(pool.process.pid)
        if "shoal.web.process" in processes.command(p)
    )
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the web process has no memory")


def change(
    owner: Browser, feeds: Feeds, person: Person, event: str, number: int
) -> tuple[float, float]:
    """Ask for a place, or take the request back. Return when the last feed and the page saw it."""
    feeds.heard, feeds.topic = {}, f"event {event}"
    asks = number % 2 == 1
    body = {"own": f"{number:032x}"} if asks else None
    begin = time.monotonic()
    done = owner.request("POST" if asks else "DELETE", f"/v1/events/{event}/requests", body)
    if done.status != 200:
        raise SystemExit(f"a change was refused: {done.data!r}")
    shown = f"p.big b:nth-of-type(2):text-is('{int(asks)}')"
    person.page.wait_for_selector(shown, timeout=30_000)
    page_s = time.monotonic() - begin
    while len(feeds.heard) < feeds.count:
        if time.monotonic() - begin > SETTLE_S:
            raise SystemExit(f"{len(feeds.heard)} of {feeds.count} feeds have heard of a change")
        time.sleep(0.002)
    return max(feeds.heard.values()) - begin, page_s


def first_view(chromium: Any, pool: StandingPool) -> float:
    """Seconds until the Pool page shows its devices, on a slow phone with nothing in its cache."""
    person = signed_in(chromium, pool, viewport={"width": 360, "height": 640})
    session = person.page.context.new_cdp_session(person.page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    session.send("Network.emulateNetworkConditions", {
        "offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 94_000,
    })  # fmt: skip
    session.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    person.page.add_init_script(NOTE_FIRST_VIEW)
    person.page.goto(pool.told["web"])
    person.until("window.firstView > 0", "the page shows its devices")
    seen_ms = float(person.page.evaluate("window.firstView"))
    person.close()
    return seen_ms / 1000


def bundle_bytes() -> int:
    return sum(
        len(gzip.compress(path.read_bytes(), 9))
        for path in web.STATIC.iterdir()
        if path.suffix in (".js", ".css", ".html", ".svg")
    )


def measure(pool: StandingPool, chromium: Any, count: int, changes: int) -> bool:
    owner = web.owner(pool)
    made = owner.request("POST", "/v1/events", {"title": "load", "places": 1}).json["event"]
    code = owner.request("GET", f"/v1/events/{made}/screen").json["code"]
    owner.request("POST", "/v1/enrol", {"code": code})
    person = signed_in(chromium, pool)
    person.open(f"event/{made}/screen")
    before = web_bytes(pool)
    feeds = Feeds(owner.host, owner.cookie, count)
    threading.Thread(target=lambda: asyncio.run(feeds.run()), daemon=True).start()
    while feeds.connected < count:
        time.sleep(0.05)
    time.sleep(1.0)
    beats = Beats(pool.url)
    beats.start()
    seen = [change(owner, feeds, person, made, number) for number in range(1, changes + 1)]
    beats.stopping.set()
    beats.join()
    grown = web_bytes(pool) - before
    person.close()
    view_s = min(first_view(chromium, pool) for _ in range(3))
    rows = [
        ("change seen by the last feed, p99", p99([f for f, _ in seen]), 1.0, "s"),
        ("change on a browser's page, p99", p99([p for _, p in seen]), 1.0, "s"),
        ("the head's latest beat", beats.late_s, 0.1, "s"),
        (f"memory for {count} feeds", grown / MiB, 64.0, "MiB"),
        ("first view on a phone profile", view_s, 1.0, "s"),
        ("bundle, gzip", bundle_bytes() / 1000, 100.0, "kB"),
    ]
    good = True
    for name, value, most, unit in rows:
        verdict = "" if value <= most else "MISSES"
        good = good and value <= most
        print(f"{name:<36}{value:>9.3f} {unit:<4} at most {most:g} {verdict}")
    return good


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--feeds", type=int, default=200)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="20 changes")
    options = parser.parse_args()
    changes = 20 if options.quick else options.changes
    with (
        tempfile.TemporaryDirectory(prefix="shoal-web-") as folder,
        StandingPool(Path(folder), web=True) as pool,
        sync_playwright() as play,
    ):
        chromium = play.chromium.launch(executable_path=web.CHROMIUM, args=["--no-sandbox"])
        good = measure(pool, chromium, options.feeds, changes)
        chromium.close()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
