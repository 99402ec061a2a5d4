"""Whoever an event grants a place gets its devices: a member's program, and a guest who joins."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.wire import people_messages as people
from tests.support import programs
from tests.support.pages import web
from tests.support.pages.web import Browser
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 200.0
USE = """
import sys, torch, shoal
with shoal.connect(wait=float(sys.argv[1]) or False) as lease:
    torch.ones(8, device="shoal").sum().item()
    print([one.info.name for one in lease.granted])
"""
HOLD = """
import shoal
lease = shoal.connect(devices=int(__import__("sys").argv[1]), memory="40MiB")
print("holds", flush=True)
input()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[StandingPool]:
    devices = ("cpu,memory=64MiB,threads=1,name=a", "cpu,memory=64MiB,threads=1,name=b")
    with StandingPool(tmp_path, *devices, listen=True, web=True) as made:
        yield made


def cli(pool: StandingPool, *arguments: str, **extra: str) -> Any:
    done = pool.run(*arguments, "--json", **({"SHOAL_POOL": pool.url} | extra))
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_members_program_and_a_guest_who_joins(pool: StandingPool, tmp_path: Path) -> None:
    ana = {
        "SHOAL_POOL": pool.network_url,
        "SHOAL_IDENTITY": str(pool.join("ana", devices_max=0).path),
    }
    refused = programs.run(USE, "0", **ana)
    assert refused.code != 0
    assert "the quota of ana" in refused.err

    opened = cli(pool, "event", "open", "GPU hour", "--places", "2", "--memory", "40MiB")
    event = opened["event"]["event"]

    def code() -> str:
        screen = pool.ask(people.ShowScreen(event))
        assert isinstance(screen, people.Screen)
        return screen.code

    cli(pool, "enrol", code(), **ana)
    guest = Browser(pool)
    assert guest.request("POST", "/v1/enrol", {"code": code(), "name": "eva"}).status == 200
    entry = guest.request("POST", f"/v1/events/{event}/requests", {"own": "ab" * 16})
    assert entry.status == 200
    cli(pool, "event", "draw", event)

    mine = cli(pool, "event", "show", event, **ana)["event"]["mine"]
    assert mine["grant"]["state"] == "open"
    [device] = mine["grant"]["devices"]
    both = programs.start(HOLD, "2", SHOAL_POOL=pool.url)
    assert both.wait(PATIENCE_S) != 0  # others get what is left
    other = programs.start(HOLD, "1", SHOAL_POOL=pool.url)
    assert other.stdout is not None
    assert other.stdout.readline() == "holds\n"
    assert programs.succeed(USE, "0", **ana) == f"['{device}']\n"
    os.kill(pool.head_pid, signal.SIGKILL)
    pool.until_whole(2, PATIENCE_S)
    assert programs.succeed(USE, "200", **ana) == f"['{device}']\n"

    def shown() -> Any:
        return guest.request("GET", f"/v1/events/{event}").json["mine"]

    assert shown()["grant"]["state"] == "join"
    invitation = shown()["join"]
    for someone_else in (web.owner(pool), Browser(pool)):
        seen = someone_else.request("GET", f"/v1/events/{event}").data.decode()
        assert invitation not in seen
        assert '"grant":"join"' in seen  # that there is one is no secret
    eva = {"SHOAL_IDENTITY": str(tmp_path / "eva.pem")}
    cli(pool, "join", invitation.removeprefix("shoal join "), "--as", "eva-laptop", **eva)
    eva["SHOAL_POOL"] = pool.network_url
    grant = shown()["grant"]
    assert (grant["state"], grant["holder"]) == ("waiting", "eva-laptop")
    assert grant["reasons"]
    waiting = programs.start(USE, "200", **eva)
    other.communicate("\n", timeout=PATIENCE_S)
    wait_until(
        lambda: shown()["grant"]["state"] == "open", PATIENCE_S, "eva's place has its device"
    )
    out, err = waiting.communicate(timeout=PATIENCE_S)
    assert out == f"{shown()['grant']['devices']}\n", err
    listed = {p["name"]: p["grant"] for p in cli(pool, "event", "show", event)["event"]["people"]}
    assert listed == {"ana": "open", "eva": "open"}
