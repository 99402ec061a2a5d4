"""Takes the dashboard's screenshots for the pages, of a small pool with tasks and an event.

    python -m bench.screenshots

Writes docs/img/dashboard.png, memory.png and event.png. It needs what `make test-all` needs: chromium
and `make web`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import programs
from tests.support.pages import web
from tests.support.pages.person import Person, signed_in
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool

IMAGES = Path(__file__).parents[1] / "docs" / "img"
WIDTH, HEIGHT = 1000, 760
DEVICES = (
    "cpu,memory=256MiB,threads=1,name=fast",
    "cpu,memory=128MiB,host=24MiB,disk=256MiB,threads=1,name=slow",
)
RUN_S = 25.0  # the charts have some samples then
PROGRAM = """
import sys, time, torch
model = torch.nn.Sequential(torch.nn.Linear(256, int(sys.argv[1])), torch.nn.ReLU(),
                            torch.nn.Linear(int(sys.argv[1]), 1)).to("shoal")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.rand(256, 256, device="shoal")
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}", flush=True)
    time.sleep(0.2)
"""
TABLES = """
import time, torch, shoal
with shoal.connect(memory="32MiB"):
    held = [torch.ones(2**20, 2, device="shoal") for _ in range(12)]  # 96 MiB
    torch.shoal.synchronize()
    print("holds", flush=True)
    while True:
        held[0] += 1
        held[0].sum().item()
        time.sleep(0.5)
"""
GUESTS = ("Ana", "Ben", "Eva", "Ida", "Jo")


def submit(pool: StandingPool, name: str, *words: str) -> None:
    command = ["submit", "--name", name, *words]
    done = pool.run(*command, SHOAL_POOL=pool.url)
    if done.code:
        sys.exit(done.err or done.out)


def take_pool(chromium: Any, pool: StandingPool) -> None:
    program = ("--", sys.executable, "-c", PROGRAM)
    submit(pool, "nightly", "--memory", "128MiB", *program, "20000")
    submit(pool, "sweep-1", "--memory", "64MiB", *program, "9000")
    submit(pool, "big", "--devices", "2", "--memory", "200MiB", *program, "100")
    submit(pool, "eval", "--memory", "220MiB", "--limit", "10m", *program, "100")
    tables = programs.start(TABLES, SHOAL_POOL=pool.url)
    assert tables.stdout is not None
    tables.stdout.readline()
    person = signed_in(chromium, pool, viewport={"width": WIDTH, "height": HEIGHT})
    time.sleep(RUN_S)
    shoot(person, "", "dashboard")
    shoot(person, "memory", "memory")
    person.close()
    tables.kill()


def take_event(chromium: Any, pool: StandingPool) -> None:
    owner = web.owner(pool)
    made = owner.request("POST", "/v1/events", {"title": "GPU hour", "places": 2}).json["event"]
    for number, name in enumerate(GUESTS):
        code = owner.request("GET", f"/v1/events/{made}/screen").json["code"]
        guest = Browser(pool)
        guest.request("POST", "/v1/enrol", {"code": code, "name": name})
        guest.request("POST", f"/v1/events/{made}/requests", {"own": f"{number:032x}"})
    person = signed_in(chromium, pool, viewport={"width": WIDTH, "height": HEIGHT})
    shoot(person, f"event/{made}/screen", "event")
    person.close()


def shoot(person: Person, path: str, name: str) -> None:
    person.open(path)
    time.sleep(2.0)  # for the charts and the QR code
    person.page.screenshot(path=IMAGES / f"{name}.png")
    print(f"wrote docs/img/{name}.png")


def main() -> None:
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory(prefix="shoal-shots-") as folder,
        StandingPool(Path(folder), *DEVICES, web=True, tasks=True) as pool,
        sync_playwright() as play,
    ):
        chromium = play.chromium.launch(executable_path=web.CHROMIUM, args=["--no-sandbox"])
        take_pool(chromium, pool)
        take_event(chromium, pool)
        for task in json.loads(pool.run("queue", "--json", SHOAL_POOL=pool.url).out):
            pool.run("cancel", task["id"], SHOAL_POOL=pool.url)
        chromium.close()


if __name__ == "__main__":
    main()
