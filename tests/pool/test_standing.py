"""A pool that outlives its clients: `shoal up` and the commands that look at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.pool.client import head_connection
from shoal.pool.wire import messages
from tests.support import processes, programs
from tests.support.standing import StandingPool, shoal_command
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(
        tmp_path_factory.mktemp("pool"),
        "cpu,memory=128MiB,threads=1,name=left,kind=a100",
        "cpu,memory=64MiB,threads=1,name=right,kind=t4",
    ) as pool:
        yield pool


def idle(pool: StandingPool) -> None:
    wait_until(lambda: not pool.status().sessions, 30, "no session is left")


# --- commands --------------------------------


def test_up_says_how_to_use_it(standing: StandingPool) -> None:
    assert standing.told["url"] == standing.url
    assert standing.told["join"] is None
    assert [d["name"] for d in standing.told["devices"]] == ["left", "right"]


def test_status_and_devices(standing: StandingPool) -> None:
    text = standing.run("status", "--pool", standing.name)
    assert text.code == 0, text.err
    assert f"pool {standing.name}: 2 device(s) on 1 node(s)" in text.out
    found = json.loads(standing.run("status", "--json", SHOAL_POOL=standing.url).out)
    assert [d["memory_bytes"] for d in found["devices"]] == [128 * MiB, 64 * MiB]
    assert found["nodes"][0]["state"] == "up"
    listed = json.loads(standing.run("devices", "--json", SHOAL_POOL=standing.url).out)
    assert [d["kind"] for d in listed] == ["a100", "t4"]
    assert "left" in standing.run("devices", SHOAL_POOL=standing.url).out


def test_top_shows_what_a_session_does(standing: StandingPool) -> None:
    with shoal.connect(standing.url, memory="32MiB"):
        x = torch.ones(1000, device="shoal")

        def told() -> bool:
            x.add_(1).sum().item()
            (session,) = standing.status().sessions
            return session.use is not None and session.use.calls > 3

        wait_until(told, 30, "the session's figures are told")
        line = standing.run("top", "--count", "1", "--json", SHOAL_POOL=standing.url).out
        (session,) = json.loads(line)["sessions"]
        assert session["granted_bytes"] == 32 * MiB
        assert session["use"]["memory_bytes"] >= x.nbytes
        page = standing.run("top", "--count", "2", "--every", "0.1", SHOAL_POOL=standing.url)
        assert page.code == 0, page.err
        assert "calls/s" in page.out
    idle(standing)


def test_the_audit_log_tells_of_leases(standing: StandingPool) -> None:
    with shoal.connect(standing.url, memory=MiB) as lease:
        pass
    idle(standing)
    entries = json.loads(standing.run("audit", "--name", standing.name, "--json").out)
    mine = [e["action"] for e in entries if f"lease {lease.epoch}:" in e["detail"]]
    assert mine == ["grant", "end"]
    assert "grant" in standing.run("audit", "--name", standing.name).out


def test_doctor_finds_nothing_wrong(standing: StandingPool) -> None:
    done = standing.run("doctor", "--json", SHOAL_POOL=standing.url)
    found = {f["what"]: f["state"] for f in json.loads(done.out)}
    assert done.code == 0, done.out
    assert found["head"] == found["clocks"] == found["devices"] == found["core"] == "good"


def test_doctor_says_what_to_type_where_there_is_no_pool(tmp_path: Path) -> None:
    done = subprocess.run(
        shoal_command("doctor"),
        env=programs.environment(SHOAL_POOL="shoal+local://0-nothing-here"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "→ shoal up" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--json"], ["devices"]])
def test_quick_commands_stay_clear_of_torch(standing: StandingPool, arguments: list[str]) -> None:
    code = (
        "import sys; from shoal.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'cryptography', 'rich', 'asyncio'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=standing.environment(SHOAL_POOL=standing.url),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "[]\n"


def test_commands_without_a_pool_say_what_to_type(tmp_path: Path) -> None:
    environment = programs.environment(
        SHOAL_STATE=str(tmp_path), SHOAL_IDENTITY=str(tmp_path / "x"), HOME=str(tmp_path)
    )
    for arguments, text in {
        ("down", "--name", "t-none"): "shoal up",
        ("revoke", "bob", "--name", "t-none"): "cannot be reached",
        ("node",): "shoal node --join CODE@HOST",
        ("join", "nonsense"): "CODE@HOST",
        ("join", "nonsense@host"): "join code",
        ("up", "--device", "gpu!"): "is not a device",
    }.items():
        done = subprocess.run(
            shoal_command(*arguments), env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1, arguments
        assert text in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("queue",), ("wait", "1"), ("logs", "1"), ("fetch", "1"), ("cancel", "1"),
     ("runner",), ("why", "1"), ("submit", "--", "true")],
    ids=" ".join,
)  # fmt: skip
def test_every_verb_says_that_there_is_no_pool(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = programs.environment(
            SHOAL_STATE=str(tmp_path), SHOAL_IDENTITY=str(tmp_path / "x"), HOME=str(tmp_path)
        )
        return subprocess.run(
            shoal_command(*words), env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip

    if run("status").returncode == 0:
        pytest.skip("the user who runs the tests has a pool `default`")
    done = run(*arguments)
    failed = 125 if arguments[0] == "wait" else 1  # `wait` keeps other codes for the program's
    assert (done.returncode, done.stdout) == (failed, "")
    assert done.stderr.startswith("Error: no pool: none runs on this machine")
    assert "`shoal up`" in done.stderr


def test_one_pool_of_a_name(standing: StandingPool) -> None:
    second = standing.run("up", "--name", standing.name)
    assert second.code == 1
    assert "runs already" in second.err
    assert standing.status().devices


# --- leases --------------------------------


def test_leases_by_kind_fraction_and_time(standing: StandingPool) -> None:
    with shoal.connect(standing.url, kind="t4|v100", memory="50%") as lease:
        (device,) = lease.granted
        assert (device.info.name, device.info.memory_bytes) == ("right", 32 * MiB)
        assert torch.ones(3, device="shoal").sum().item() == 3
    with shoal.connect(standing.url, kind="A100", memory=0.25) as lease:
        assert lease.granted[0].info.memory_bytes == 32 * MiB
    with pytest.raises(shoal.LeaseError, match="the pool has 0 of that kind"):
        shoal.connect(standing.url, kind="h100")
    with shoal.connect(standing.url, memory=MiB, duration_s=0.2) as lease:
        x = torch.ones(3, device="shoal")
        with pytest.raises(shoal.DeviceLostError):
            wait_until(lambda: x.sum().item() != 3, 30, "the lease's time is over")
        wait_until(lambda: lease.end_reason is not None, 30, "the reason is told")
        assert "time" in str(lease.end_reason)
    idle(standing)


def test_an_unmodified_program_joins_by_its_environment(standing: StandingPool) -> None:
    out = programs.succeed(
        "import torch; print(torch.ones(3, device='shoal').sum().item())", SHOAL_POOL=standing.url
    )
    assert out == "3.0\n"
    idle(standing)


def test_several_clients_share_a_device(standing: StandingPool) -> None:
    clients = [
        programs.start(
            """
            import shoal, torch
            lease = shoal.connect(kind="a100", memory="32MiB")
            print(lease.worker_pids[0], flush=True)
            input()
            """,
            SHOAL_POOL=standing.url,
        )
        for _ in range(2)
    ]
    workers = []
    for each in clients:
        assert each.stdout is not None
        workers.append(int(each.stdout.readline()))
    assert len(set(workers)) == 2
    found = standing.status()
    assert {s.device for s in found.sessions} == {0}
    assert found.devices[0].free_bytes == 64 * MiB
    clients[0].kill()
    wait_until(lambda: not processes.alive(workers[0]), 8, "the killed client's worker is gone")
    wait_until(lambda: len(standing.status().sessions) == 1, 30, "its lease has ended")
    assert processes.alive(workers[1])
    for each in clients:
        each.communicate("\n", timeout=60)
    idle(standing)


def test_a_lost_worker_is_told_with_the_reason(standing: StandingPool) -> None:
    with shoal.connect(standing.url, devices=2, memory=MiB) as lease:
        torch.ones(3, device="shoal:2").sum().item()
        os.kill(lease.worker_pids[1], signal.SIGKILL)
        wait_until(lambda: lease.end_reason is not None, 30, "the reason is told")
        assert "SIGKILL" in str(lease.end_reason)
        with pytest.raises(shoal.DeviceLostError):
            torch.ones(3, device="shoal:2").sum().item()
        assert torch.ones(3, device="shoal:1").sum().item() == 3
        assert len(standing.status().sessions) == 1
    idle(standing)


def test_someone_elses_lease_cannot_be_resumed(standing: StandingPool) -> None:
    with (
        shoal.connect(standing.url, memory=MiB) as lease,
        head_connection.Connection(standing.url) as other,
    ):
        for secret in ("", "x" * 32):
            with pytest.raises(shoal.LeaseError, match="another program"):
                with head_connection.Connection(standing.url) as guess:
                    guess.ask(messages.Resume(lease.epoch, lease.epoch, secret))
        with pytest.raises(shoal.LeaseError, match="has ended"):
            other.ask(messages.Resume(lease.epoch + 7, lease.epoch + 7, "x"))
        assert torch.ones(3, device="shoal").sum().item() == 3
    idle(standing)


# --- ends --------------------------------


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_nothing_is_left_of_a_pool(tmp_path: Path, number: int) -> None:
    pool = StandingPool(tmp_path)
    try:
        lease = shoal.connect(pool.url)
        x = torch.ones(3, device="shoal")
        pids = pool.pids()
        assert set(lease.worker_pids) < set(pids)
    finally:
        pool.stop(number)
    wait_until(lambda: not any(map(processes.alive, pids)), 8, "the pool's processes are gone")
    with pytest.raises(shoal.DeviceLostError):
        wait_until(lambda: x.sum().item() != 3, 30, "the device is lost")
    lease.close()


@pytest.mark.slow
def test_a_pool_in_the_background_and_down(tmp_path: Path) -> None:
    environment = programs.environment(SHOAL_STATE=str(tmp_path))
    name = f"t-bg-{os.getpid()}"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            shoal_command(*arguments), env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("up", "--detach", "--name", name, "--device", "cpu,memory=16MiB", "--json")
    told = json.loads(out)
    try:
        assert processes.alive(told["pid"])
        assert json.loads(run("status", "--pool", name, "--json"))["pool"] == name
    finally:
        assert "has ended" in run("down", "--name", name)
    wait_until(lambda: not processes.alive(told["pid"]), 30, "the supervisor is gone")
