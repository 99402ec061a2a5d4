"""Kills the head and the web process while events close and draws are made, and checks the results.

There is one result for each event, the same for everybody and after every restart: the proof is right,
has every receipt and the commitment of the opening, and grants what the entrants' pages say.

    python -m bench.event_chaos                # 100 rounds
    python -m bench.event_chaos --rounds 10 --seed 3

Exit code 1: something did not hold; the lines above say what.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tests.support import processes
from tests.support.pages import web
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool

from shoal.errors import LeaseError
from shoal.people import draw
from shoal.pool.client import head_connection
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people

AWAY_S = 60.0  # for a killed process to be back
BUSY_S = 0.08  # a kill falls into this time after the close began
GUESTS = 6


class Gone(Exception):
    """The pool did not answer in time."""


@dataclass
class Found:
    problems: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)


def ask(pool: StandingPool, request: messages.FromClient) -> messages.FromHead:
    """Ask the head, again while it is away."""
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            with head_connection.Connection(pool.url, 10) as connection:
                return connection.ask(request, 10)
        except (head_connection.PoolUnreachable, OSError) as error:
            if time.monotonic() > deadline:
                raise Gone(f"the head is away: {error}") from None
            time.sleep(0.02)


def as_guest(pool: StandingPool, token: str, request: msgspec.Struct) -> messages.FromHead:
    return ask(pool, people.WebAsk(token, msgspec.msgpack.encode(request)))


def over_http(browser: Browser, path: str) -> bytes:
    """GET by the web process, again while it is away."""
    deadline = time.monotonic() + AWAY_S
    while True:
        with suppress(OSError):
            answer = browser.request("GET", path)
            if answer.status == 200:
                return answer.data
        if time.monotonic() > deadline:
            raise Gone(f"no answer to GET {path}")
        time.sleep(0.05)


def kill(pool: StandingPool, role: str, found: Found) -> None:
    name = {"head": "shoal.pool.local.head_process", "web": "shoal.web.process"}[role]
    for pid in processes.children(pool.process.pid):
        if name in processes.command(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            found.kills[role] += 1


def enrol(pool: StandingPool, event: str) -> dict[str, tuple[str, str]]:
    """Guests who ask for a place: name -> token and receipt."""
    entrants = {}
    for number in range(GUESTS):
        screen = ask(pool, people.ShowScreen(event))
        assert isinstance(screen, people.Screen)
        enrolled = as_guest(pool, "", people.Enrol(screen.code, f"guest {number}"))
        assert isinstance(enrolled, people.Enrolled)
        own = f"{random.getrandbits(128):032x}"
        receipt = as_guest(pool, enrolled.token, people.AskPlace(event, own))
        assert isinstance(receipt, people.Receipt)
        entrants[enrolled.name] = enrolled.token, receipt.receipt
    return entrants


def close_and_draw(pool: StandingPool, event: str, found: Found) -> None:
    """Draw, as an admin who repeats what was not answered."""
    while True:
        try:
            shown = ask(pool, people.DrawEvent(event))
            assert isinstance(shown, people.EventInfo)
            found.states[shown.state] += 1
            return
        except LeaseError as error:
            shown = ask(pool, people.ShowEvent(event))
            assert isinstance(shown, people.EventInfo)
            if shown.state == "done":
                return
            found.problems.append(f"{event}: the draw was refused: {error}")
            return


def check(
    pool: StandingPool,
    browser: Browser,
    opened: people.EventInfo,
    entrants: dict[str, tuple[str, str]],
    found: Found,
) -> list[str]:
    """Compare what everybody sees of the result. Return the winners."""
    event = opened.event
    text = ask(pool, people.AskProof(event))
    assert isinstance(text, people.ProofText)
    receipts = [receipt for _, receipt in entrants.values()]
    proof = draw.verify(text.text.encode(), opened.commitment, receipts)

    def expect(what: str, seen: object, wanted: object) -> None:
        if seen != wanted:
            found.problems.append(f"{event}: {what} {seen!r} instead of {wanted!r}")

    shown = json.loads(over_http(browser, f"/v1/events/{event}"))
    expect("the page has the winners", shown["winners"], proof.winners)
    expect("the page has the list", shown["list_hash"], proof.list_hash)
    expect("M", shown["requests"], GUESTS)
    expect("N and struck out", shown["remaining"] + shown["struck_out"], GUESTS)
    over_web = over_http(browser, f"/v1/events/{event}/proof").decode()
    expect("the page's proof", over_web, text.text)
    for name, (token, receipt) in entrants.items():
        seen = as_guest(pool, token, people.ShowEvent(event))
        assert isinstance(seen, people.EventInfo)
        assert seen.mine is not None
        right = "granted" if name in proof.winners else "not-drawn"
        expect(f"{name} sees", seen.mine.ended, right)
        expect(f"{name} keeps", seen.mine.receipt, receipt)
        expect(f"{name} has a code", bool(seen.mine.join), name in proof.winners)
    return proof.winners


def one_round(
    pool: StandingPool, browser: Browser, chance: random.Random, found: Found
) -> tuple[people.EventInfo, list[str]]:
    opened = ask(pool, people.OpenEvent("chaos", 2))
    assert isinstance(opened, people.EventInfo)
    entrants = enrol(pool, opened.event)
    drawing = threading.Thread(target=close_and_draw, args=(pool, opened.event, found), daemon=True)
    drawing.start()
    for role in chance.choice((["head"], ["head", "web"], ["web", "head"], ["head", "head"])):
        time.sleep(chance.uniform(0, BUSY_S))
        kill(pool, role, found)
    drawing.join(AWAY_S)
    if drawing.is_alive():
        raise Gone(f"the draw of {opened.event} has no answer")
    return opened, check(pool, browser, opened, entrants, found)


def chaos(pool: StandingPool, rounds: int, seed: int) -> Found:
    """Run all rounds; at the end all results are still those that people saw."""
    found, chance = Found(), random.Random(seed)
    browser = web.owner(pool)
    seen: dict[str, list[str]] = {}
    for number in range(rounds):
        try:
            opened, winners = one_round(pool, browser, chance, found)
            seen[opened.event] = winners
        except (Gone, LeaseError, draw.ProofError) as error:
            found.problems.append(f"round {number}: {error}")
    kill(pool, "head", found)
    for event, winners in seen.items():
        shown = ask(pool, people.ShowEvent(event))
        assert isinstance(shown, people.EventInfo)
        if shown.winners != winners:
            found.problems.append(f"{event}: {winners} won, and later {shown.winners}")
    chain = ask(pool, messages.VerifyAudit())
    assert isinstance(chain, messages.AuditVerdict)
    if chain.wrong is not None:
        found.problems.append(f"the audit log is wrong from entry {chain.wrong} on")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        with StandingPool(Path(folder), listen=True, web=True) as pool:
            found = chaos(pool, options.rounds, options.seed)
    print(f"{options.rounds} rounds; killed {dict(found.kills)}; {len(found.problems)} problems")
    for problem in found.problems:
        print(problem)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
