"""Tasks in a real browser: submitted by the command line, watched, followed, cancelled."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.client.tasks import TaskClient
from tests.support import processes
from tests.support.pages import web
from tests.support.pages.person import AXE, PATIENCE_S, Person, axe_findings, decode_qr, signed_in
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

pytestmark = [web.needs_pages, web.needs_browser, pytest.mark.slow, pytest.mark.timeout(600)]
MiB = 2**20
#: Writes a line for every line that it is given, and ends with its standard input.
ECHO = """
import os, sys, time
size = 0
while True:
    with open(sys.argv[1]) as told:
        told.seek(size)
        lines = told.readlines()
    for line in lines:
        size += len(line)
        print("heard", line.strip(), flush=True)
        if line == "end\\n":
            sys.exit(0)
    time.sleep(0.05)
"""
HOLD = """
import sys, time, torch
held = [torch.ones(2 * 2**20, dtype=torch.float64, device="shoal") for _ in range(6)]
torch.shoal.synchronize()
print("holds", flush=True)
while True:
    held[0] += 1
    held[0].sum().item()
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    folder = tmp_path_factory.mktemp("pages")
    device = "cpu,memory=64MiB,host=16MiB,disk=64MiB,threads=1,name=only"
    with StandingPool(folder, device, web=True, tasks=True) as made:
        yield made


@pytest.fixture(autouse=True)
def _end_tasks(pool: StandingPool) -> Iterator[None]:
    yield
    with TaskClient(pool.url) as client:
        for task in list(client.tasks()):
            client.change(task.id, "cancel")
            client.wait(task.id, PATIENCE_S)


def submit(pool: StandingPool, *arguments: str) -> str:
    done = pool.run("submit", "--json", *arguments, SHOAL_POOL=pool.url)
    assert done.code == 0, done.err
    return str(json.loads(done.out)["id"])


def kill_web(pool: StandingPool) -> None:
    def mine() -> list[int]:
        children = processes.children(pool.process.pid)
        return [p for p in children if "shoal.web.process" in processes.command(p)]

    wait_until(lambda: len(mine()) == 1, PATIENCE_S, "the web process runs")
    os.kill(mine()[0], signal.SIGKILL)


def test_a_log_goes_on_over_a_killed_web_process(
    chromium: Any, pool: StandingPool, tmp_path: Path
) -> None:
    told = tmp_path / "told.txt"
    told.write_text("one\n")
    task = submit(pool, "--name", "echo", "--", sys.executable, "-c", ECHO, str(told))
    person = signed_in(chromium, pool, viewport={"width": 320, "height": 640})
    person.page.click(f"a:has-text('{task}')")  # it came by itself: nobody loaded the page again
    log = person.page.get_by_role("region", name="Log")
    log.get_by_text("heard one").wait_for()
    person.page.wait_for_selector("b:has-text('running')")
    for line in ("two", "three"):
        kill_web(pool)
        with told.open("a") as more:
            more.write(f"{line}\n")
        log.get_by_text(f"heard {line}").wait_for()
    with told.open("a") as more:
        more.write("end\n")
    person.page.wait_for_selector("text=the end: succeeded")
    person.page.wait_for_selector("b:has-text('succeeded')")
    whole = "".join(f"heard {line}\n" for line in ("one", "two", "three", "end"))
    assert log.text_content() == whole  # nothing twice, nothing lost
    person.close()


def test_watch_suppose_and_cancel(chromium: Any, pool: StandingPool) -> None:
    person = signed_in(chromium, pool)
    holder = submit(pool, "--name", "holder", "--devices", "1", "--", sys.executable, "-c", HOLD)
    waiter = submit(pool, "--name", "waiter", "--devices", "2", "--", sys.executable, "-c", "")
    person.page.click(f"a:has-text('{waiter}')")
    person.page.wait_for_selector("text=As the pool is, it never runs")
    person.page.get_by_label("Devices").fill("1")
    person.page.get_by_label("Memory of each").fill("4MiB")
    person.press("Suppose")
    supposed = person.page.locator("#supposed")
    supposed.get_by_text("With devices 1, memory_bytes 4194304").wait_for()
    assert supposed.get_by_text("it never runs").count() == 0
    person.press("Cancel")
    person.page.wait_for_selector("b:has-text('cancelled')")

    person.open(f"task/{holder}")
    person.page.get_by_role("heading", name="holder").wait_for()  # as text
    person.page.get_by_role("region", name="Log").get_by_text("holds").wait_for()
    person.open("memory")
    for place in ("only", "host memory", "disk"):
        for picture in (f"{place}:", f"Addresses on {place}:"):
            shown = person.page.get_by_role("img", name=picture).first
            shown.locator("rect:not(.back)").first.wait_for(state="attached")
    [begin] = person.page.locator(".ranges code").all_inner_texts()
    assert int(begin, 16) % 2**52 == 0  # where the session's addresses begin
    assert int(begin, 16) > 0
    person.until(
        """[...document.querySelectorAll("tbody tr")].some((row) => {
          const shown = [...row.cells].slice(4, 7).map((cell) => parseFloat(cell.innerText));
          return shown.length === 3 && shown.every((bytes) => bytes > 0);
        })""",
        "bytes of the program are on the device, in host memory and on disk",
    )
    person.open("")
    person.page.locator(".spark canvas").first.wait_for(state="attached")
    person.page.get_by_role("img", name="only: owner").wait_for()  # the Gantt's row
    assert pool.run("cancel", holder, SHOAL_POOL=pool.url).code == 0
    person.page.wait_for_selector("text=No task runs.")
    person.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_with_tasks_are_for_everybody(chromium: Any, pool: StandingPool, scheme: str) -> None:
    """axe, 320 px, both schemes, on pages that show something."""
    if not AXE.exists():
        pytest.skip("axe-core is missing: python web/build.py --check")
    holder = submit(pool, "--devices", "1", "--", sys.executable, "-c", HOLD)
    waiter = submit(pool, "--devices", "2", "--name", "l" * 48, "--", sys.executable, "-c", "")
    person = signed_in(chromium, pool, viewport={"width": 320, "height": 700}, color_scheme=scheme)
    person.open(f"task/{holder}")
    person.page.get_by_role("region", name="Log").get_by_text("holds").wait_for()
    for path in ("", "tasks", "memory", "device/0", f"task/{holder}", f"task/{waiter}"):
        person.open(path)
        person.until("document.querySelector('main').innerText.length > 60", f"/{path} is there")
        assert axe_findings(person) == [], path
    for task in (holder, waiter):
        assert pool.run("cancel", task, SHOAL_POOL=pool.url).code == 0
    person.close()


def test_the_files_of_a_task_are_downloaded(
    chromium: Any, pool: StandingPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "open('result.html', 'w').write('<script>alert(1)</script>')"
    task = submit(pool, "--keep", "*.html", "--", sys.executable, "-c", program)
    person = signed_in(chromium, pool)
    person.open(f"task/{task}")
    person.page.wait_for_selector("b:has-text('succeeded')")
    with person.page.expect_download() as download:
        person.page.get_by_role("link", name="result.html").click()
    assert Path(download.value.path()).read_text() == "<script>alert(1)</script>"
    person.close()


def test_a_browser_that_asks_is_signed_in_by_a_phone(chromium: Any, pool: StandingPool) -> None:
    asking = Person(chromium, pool)
    asking.open("")
    asking.press("Ask a member instead")
    asking.page.wait_for_selector("img")
    link = decode_qr(asking.page.screenshot())
    phone = signed_in(chromium, pool, viewport={"width": 320, "height": 640})
    phone.page.goto(link)
    phone.press("Sign it in as owner")
    asking.page.wait_for_selector("h1:has-text('Pool')")
    asking.close()
    phone.close()
