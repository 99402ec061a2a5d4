"""The dashboard with more rows than a page, as each role, and on addresses that name nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from tests.support.pages import web
from tests.support.pages.person import AXE, Person, axe_findings, signed_in
from tests.support.standing import StandingPool

pytestmark = [
    web.needs_pages,
    web.needs_browser,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
PHONE = {"width": 320, "height": 700}
ROWS = "tbody tr"
TASKS = 230
PEOPLE = 220


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    folder = tmp_path_factory.mktemp("many")
    with StandingPool(folder, listen=True, web=True, tasks=True) as made:
        yield made


@pytest.fixture(scope="module")
def event(pool: StandingPool) -> str:
    """An event with more people than a page, who all wait for approval."""
    done = pool.run("event", "open", "crowd", "--approval", "hand", "--json", "--pool", pool.name)
    number = str(json.loads(done.out)["event"]["event"])
    for nth in range(PEOPLE):
        screen = pool.ask(people.ShowScreen(number))
        assert isinstance(screen, people.Screen)
        enrol = people.Enrol(screen.code, f"guest {nth}")
        pool.ask(people.WebAsk("", msgspec.msgpack.encode(enrol)))
    return number


def member(chromium: Any, pool: StandingPool, name: str) -> Person:
    environment = {
        "SHOAL_POOL": pool.network_url,
        "SHOAL_IDENTITY": str(pool.join(name).path),
    }
    person = Person(chromium, pool, viewport=PHONE)
    link = pool.run("open", "--print", **environment).out.strip()
    person.page.goto(link)
    person.page.locator("h1", has_text="Pool ").wait_for()
    return person


def rows(person: Person, count: int) -> None:
    person.until(f"document.querySelectorAll('{ROWS}').length === {count}", f"{count} rows")


def test_tasks_and_people_by_pages(chromium: Any, pool: StandingPool, event: str) -> None:
    numbers = ",".join(map(str, range(TASKS)))
    program = ["--devices", "2", "--each", f"n={numbers}", "--", sys.executable, "-c", "", "{n}"]
    done = pool.run("submit", "--json", *program, SHOAL_POOL=pool.url)
    assert done.code == 0, done.err
    person = signed_in(chromium, pool)
    person.open("tasks")
    rows(person, 200)
    person.press("Next page")
    rows(person, TASKS - 200)
    person.press("First page")
    rows(person, 200)
    person.page.get_by_text("Tasks by number from 1 on").wait_for()

    person.open(f"event/{event}")
    rows(person, 200)
    person.press("Next page")
    rows(person, PEOPLE - 200)
    person.press("Approve guest-219")
    person.page.locator("tr", has_text="guest-219").get_by_text("approved").wait_for()
    rows(person, PEOPLE - 200)
    for nth in range(201):
        opened = pool.ask(people.OpenEvent(f"event {nth}", 1))
        assert isinstance(opened, people.EventInfo)
        pool.ask(people.CancelEvent(opened.event))
    person.open("events")
    rows(person, 200)
    person.press("Older events")
    person.page.get_by_role("link", name="crowd").wait_for()
    person.press("Newest events")
    rows(person, 200)
    person.close()


def test_a_member_sees_what_it_may_do(chromium: Any, pool: StandingPool, event: str) -> None:
    done = pool.run("submit", "--json", "--devices", "2", "--", "true", SHOAL_POOL=pool.url)
    task = json.loads(done.out)["id"]
    ana = member(chromium, pool, "ana")
    ana.open(f"task/{task}")
    ana.page.get_by_text("Only owner and admins see its command").wait_for()
    assert ana.page.get_by_role("button", name="Cancel").count() == 0
    ana.open(f"event/{event}")
    rows(ana, 200)
    assert ana.page.get_by_role("button", name="Approve").count() == 0
    ana.open("people")
    ana.page.get_by_text("Only admins see who has joined").wait_for()
    ana.open("audit")
    ana.page.get_by_role("alert").get_by_text("needs the role admin").wait_for()
    if AXE.exists():
        for path in ("people", "audit", f"task/{task}", "tasks"):
            ana.open(path)
            assert axe_findings(ana) == [], path
    ana.close()


def test_a_stranger_reads_the_result_and_checks_the_proof(
    chromium: Any, pool: StandingPool
) -> None:
    opened = pool.ask(people.OpenEvent("open to all", 1))
    assert isinstance(opened, people.EventInfo)
    stranger = Person(chromium, pool, viewport=PHONE)
    stranger.open(f"event/{opened.event}")
    stranger.page.get_by_role("link", name="Enter the code of the screen").wait_for()
    screen = pool.ask(people.ShowScreen(opened.event))
    assert isinstance(screen, people.Screen)
    pool.ask(people.Enrol(screen.code))
    pool.ask(people.AskPlace(opened.event, "ab" * 16))
    pool.ask(people.DrawEvent(opened.event))
    stranger.open(f"event/{opened.event}")
    stranger.press("Check it here")
    stranger.page.get_by_text("This browser recomputed the draw: owner — it is right.").wait_for()
    stranger.page.get_by_role("link", name="Sign in").click()
    stranger.page.locator("h1", has_text="Sign in").wait_for()
    stranger.close()


def test_addresses_that_name_nothing(chromium: Any, pool: StandingPool) -> None:
    person = signed_in(chromium, pool, viewport=PHONE)
    for path in ("nowhere", "event/ZZZ", "task/none", "device/77", "event/%22%3E%3Cb%3E"):
        answer = person.page.goto(f"{person.address}/{path}")
        assert answer.status == (404 if path == "nowhere" else 200), path
        person.page.wait_for_selector("h1")
        if AXE.exists():
            assert axe_findings(person) == [], path
    person.close()
    browser = web.owner(pool)
    for path in ("/v1/nowhere", "/assets/nowhere"):
        missing = browser.request("GET", path, Accept="text/html")
        assert missing.headers["content-type"] == "application/problem+json", path
    assert browser.request("GET", "/nowhere").status == 404
    assert isinstance(pool.ask(messages.AskStatus()), messages.PoolStatus)
