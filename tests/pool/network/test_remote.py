"""A device that is reached by network: here over loopback, which takes the same way as a cable."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal import _core
from shoal.pool.wire import messages, tls
from tests.support import processes, programs
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    directory = tmp_path_factory.mktemp("remote")
    devices = ["cpu,memory=512MiB,threads=1,name=left", "cpu,memory=512MiB,threads=1,name=right"]
    with StandingPool(directory, *devices, listen=True) as made:
        yield made


@pytest.fixture(scope="module")
def member(pool: StandingPool) -> tls.Identity:
    return pool.join("member")


@pytest.fixture(autouse=True)
def _as_member(member: tls.Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_IDENTITY", str(member.path))


def connect(pool: StandingPool, devices: int = 1) -> shoal.Lease:
    return shoal.connect(pool.network_url, devices=devices, memory="200MiB", transport="network")


def train(device: str, steps: int = 5) -> list[float]:
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
    head = torch.nn.Linear(32, 7).to(device)
    parameters = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 12, 32).to(device), torch.randint(7, (48,)).to(device)
        loss = torch.nn.functional.cross_entropy(head(layer(x)).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_training_is_the_local_one(pool: StandingPool) -> None:
    with connect(pool):
        assert train("shoal") == pytest.approx(train("cpu"), rel=1e-5)


@pytest.mark.parametrize("name", ["copied", "added"])
def test_half_a_copy_from_a_killed_device_is_never_read(pool: StandingPool, name: str) -> None:
    """Its worker is stopped with some of the bytes on their way, and dies so. Whatever has come, a
    reader finds all of it or an error."""
    with connect(pool, devices=2) as lease:
        here = torch.ones(16 * MiB, device="shoal:1")
        there = torch.full((16 * MiB,), 2.0, device="shoal:2")
        torch.shoal.synchronize()
        if name == "copied":
            here.copy_(there)
        else:
            assert _core.add_from(here, there)
        os.kill(lease.worker_pids[1], signal.SIGSTOP)
        os.kill(lease.worker_pids[1], signal.SIGKILL)
        found = set()
        for _ in range(2):
            try:
                found |= {here.amin().item(), here.amax().item()}
            except shoal.DeviceLostError:
                found.add("lost")
    assert found in ({"lost"}, {2.0 if name == "copied" else 3.0})
    pool.until_whole(2)


@pytest.mark.parametrize("count", [1, 1024, 1025, MiB // 4, MiB // 4 + 1, 5 * MiB + 3])
def test_every_size_goes_there_and_back(pool: StandingPool, count: int) -> None:
    """Inline, one piece, several; pageable and pinned; staged and straight from the tensor."""
    source = torch.arange(count, dtype=torch.int32)
    with connect(pool):
        remote = source.to("shoal")
        source += 1  # it was sent, or copied, before the call returned
        assert torch.equal(remote.cpu() + 1, source)
        pinned = source.pin_memory()
        back = torch.empty_like(source).pin_memory()
        back.copy_(pinned.to("shoal", non_blocking=True), non_blocking=True)
        again = back.to("shoal", non_blocking=True)  # in the stream's order: behind its arrival
        assert torch.equal(again.cpu(), source)


@pytest.mark.parametrize("lanes", ["0", "1", "4"])
def test_any_number_of_lanes_carries_the_same(
    pool: StandingPool, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers of all sizes, both ways at once, between calls that use and change what they move."""
    monkeypatch.setenv("SHOAL_LANES", lanes)
    dice = random.Random(int(lanes))
    with connect(pool):
        here = torch.randint(256, (3 * MiB,), dtype=torch.uint8)
        there = here.to("shoal")
        hosts = [torch.empty_like(here).pin_memory() for _ in range(3)]
        for i in range(30):
            start = dice.randrange(here.numel())
            end = min(here.numel(), start + dice.choice([100, 10_000, 300_000, 3 * MiB]))
            piece = torch.full((end - start,), i, dtype=torch.uint8)
            piece = piece.pin_memory() if dice.random() < 0.5 else piece
            there[start:end].copy_(piece, non_blocking=True)
            here[start:end].copy_(piece)
            there += 1
            here += 1
            hosts[i % 3].copy_(there, non_blocking=True)
            if dice.random() < 0.3:  # behind a download into it: what has arrived is sent back
                there = hosts[i % 3].to("shoal", non_blocking=True)
            if dice.random() < 0.2:
                assert there[end - 1].item() == here[end - 1]
        torch.shoal.synchronize()
        assert torch.equal(hosts[29 % 3], here)
        assert torch.equal(there.cpu(), here)


def test_a_number_of_lanes_that_cannot_be(
    pool: StandingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_LANES", "99")
    with pytest.raises(
        shoal.LeaseError, match="SHOAL_LANES must be a number from 0 to 4 \\(got '99'\\)"
    ):
        connect(pool)


def test_a_program_with_several_threads(pool: StandingPool) -> None:
    """Downloads of one thread and scalars of another share the connections."""
    with connect(pool):
        big = torch.arange(4 * MiB, device="shoal")
        wrong: list[str] = []

        def download() -> None:
            for _ in range(5):
                if big.cpu()[-1] != 4 * MiB - 1:
                    wrong.append("download")

        def scalars() -> None:
            x = torch.ones((), device="shoal")
            for i in range(50):
                if (x + i).item() != i + 1:
                    wrong.append("scalar")

        threads = [threading.Thread(target=run) for run in (download, scalars, scalars)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_the_time_between_two_events_is_not_asked_for(pool: StandingPool) -> None:
    """A question would wait for all that was issued before it."""
    with connect(pool):
        x = torch.randn(400, 400, device="shoal")
        start, middle, stop = (torch.Event("shoal", enable_timing=True) for _ in range(3))
        asked = torch.shoal.traffic()["round_trips"]
        start.record()
        for _ in range(20):
            x = torch.tanh(x @ x)
        middle.record()
        for _ in range(20):
            x = torch.tanh(x @ x)
        stop.record()
        x.sum()  # so that the stream does not end with an event, which is asked for by a reply
        wait_until(stop.query, 30, "the second event is passed")
        first, both = start.elapsed_time(middle), start.elapsed_time(stop)
        assert 0 < first < both
        assert torch.shoal.traffic()["round_trips"] == asked


def test_a_small_question_behind_a_long_call_is_answered(pool: StandingPool) -> None:
    """Who sends replies may sleep for nothing, for an event, or for a reply: each is woken."""
    with connect(pool):
        x = torch.randn(700, 700, device="shoal")
        total = 0.0
        for n in range(60):
            if n % 3:
                x = torch.tanh(x @ x)
            if n % 4 == 1:
                torch.Event("shoal").record()
            if n % 2:
                total += x[0, 0].item()
        assert abs(total) <= 60


def test_errors_come_with_the_operator(pool: StandingPool) -> None:
    with connect(pool):
        index = torch.tensor([9], device="shoal")
        torch.ones(3, device="shoal")[index]
        with pytest.raises(IndexError, match="index"):
            torch.shoal.synchronize()
        assert torch.ones(3, device="shoal").sum().item() == 3


def test_two_devices_copy_from_one_another(pool: StandingPool) -> None:
    """Worker to worker through their doors, and a value that is overwritten while it is read."""
    with connect(pool, devices=2):
        x = torch.arange(3 * MiB)
        on_left = x.to("shoal:1")
        for i in range(10):
            on_right = on_left.to("shoal:2")
            on_left += 1
            assert torch.equal(on_right.cpu(), x + i)
        assert train("shoal:2") == pytest.approx(train("cpu"), rel=1e-5)


@pytest.mark.parametrize("layout", [{"groups": 2}, {"groups": 1, "devices": 2}])
def test_worker_groups_train_on_remote_devices(pool: StandingPool, layout: dict[str, int]) -> None:
    """Gradients and activations cross; remote processes cannot be inspected, and need not be."""
    import shoal.train
    from tests.train.models import KINDS, adamw, made

    def losses() -> list[float]:
        model = made("gpt")
        with shoal.train.worker_groups(**layout) as groups:
            with shoal.train.Trainer(
                model, KINDS["gpt"][1], adamw(model), groups, micro_batches=2, balance=False
            ) as trainer:
                return [trainer.step(KINDS["gpt"][2](step, 8)).loss for step in range(3)]

    with connect(pool, devices=2):
        by_network = losses()
    with shoal.connect(pool.url, devices=2, memory="200MiB"):
        assert losses() == by_network


def test_a_lease_of_one_local_and_one_remote_device(
    pool: StandingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.device import worker_connections

    reach = worker_connections._reach

    def only_left(device: messages.GrantedDevice) -> object:
        return reach(device) if device.info.name == "left" else None

    monkeypatch.setattr(worker_connections, "_reach", only_left)
    with shoal.connect(pool.network_url, devices=2, memory="200MiB") as lease:
        assert {d.info.name for d in lease.granted} == {"left", "right"}
        x = torch.randn(MiB)
        for there, here in (("shoal:1", "shoal:2"), ("shoal:2", "shoal:1")):
            assert torch.equal(x.to(there).to(here).cpu(), x)


def test_what_must_be_said_to_reach_a_device_by_network(pool: StandingPool) -> None:
    with pytest.raises(ValueError, match="transport is one of auto, network"):
        shoal.connect(transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(shoal.LeaseError, match="identity of a client that joined"):
        shoal.connect(pool.url, transport="network")
    with (
        shoal.up(["cpu,memory=16MiB"]) as closed,
        pytest.raises(shoal.LeaseError, match="shoal up --listen"),
    ):
        shoal.connect(closed.url, transport="network")


# --- ends --------------------------------

HOLDER = """
    import sys, torch, shoal
    lease = shoal.connect(sys.argv[1], memory="64MiB", transport="network")
    x = torch.ones(1000, device="shoal")
    print(lease.worker_pids[0], flush=True)
    while True:
        x.add_(1).sum().item()
"""


def holder(pool: StandingPool, member: tls.Identity) -> tuple[subprocess.Popen[str], int]:
    program = programs.start(HOLDER, pool.network_url, SHOAL_IDENTITY=str(member.path))
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    return program, int(line)


def test_a_killed_client_leaves_no_worker(pool: StandingPool, member: tls.Identity) -> None:
    program, worker = holder(pool, member)
    program.kill()
    wait_until(lambda: not processes.alive(worker), 8, "the worker has ended")
    program.communicate()


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_a_killed_worker_is_a_lost_device(
    pool: StandingPool, member: tls.Identity, victim: str
) -> None:
    program, worker = holder(pool, member)
    os.kill(worker if victim == "worker" else processes.server_of(worker), signal.SIGKILL)
    _, err = program.communicate(timeout=60)
    assert "DeviceLostError" in err
    pool.until_whole(2)


def test_a_peer_that_is_lost_is_named(pool: StandingPool) -> None:
    """Its reader does not wait for ever, and says who is gone."""
    with connect(pool, devices=2) as lease:
        x = torch.ones(MiB, device="shoal:1")
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[0], signal.SIGSTOP)
        try:
            y = torch.ones(1, device="shoal:2")
            with pytest.raises(shoal.DeviceLostError, match="lost"):
                (x.to("shoal:2")[0] + y).item()
        finally:
            os.kill(lease.worker_pids[0], signal.SIGKILL)
    pool.until_whole(2)


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_a_heart_beats_until_the_worker_is_stopped(pool: StandingPool, transport: str) -> None:
    """Also during a call that nobody waits for; nobody is asked."""
    url = pool.network_url if transport == "network" else pool.url
    with shoal.connect(url, devices=2, memory="64MiB", transport=transport) as lease:  # type: ignore[arg-type]
        before = [lease.heartbeat(0), lease.heartbeat(1)]
        for device in (0, 1):
            wait_until(
                lambda d=device: lease.heartbeat(d) != before[d],  # type: ignore[misc]
                5,
                "its heart beats",
            )
        os.kill(lease.worker_pids[1], signal.SIGSTOP)
        try:
            first = lease.heartbeat(0)
            wait_until(lambda: lease.heartbeat(0) != first, 30, "the other's heart beats")
            still = lease.heartbeat(1)
            first = lease.heartbeat(0)
            wait_until(lambda: (lease.heartbeat(0) or 0) > (first or 0) + 2, 30, "it goes on")
            assert lease.heartbeat(1) == still
        finally:
            os.kill(lease.worker_pids[1], signal.SIGKILL)
    assert lease.heartbeat(0) is None
    pool.until_whole(2)


def test_a_revoked_client_is_out(pool: StandingPool) -> None:
    eve = pool.join("eve")
    program, worker = holder(pool, eve)
    pool.ask(messages.RevokeClient(eve.name))
    wait_until(lambda: not processes.alive(worker), 8, "the worker has ended")
    _, err = program.communicate(timeout=60)
    assert "DeviceLostError" in err


def test_a_forked_child_leaves_the_session_alone(pool: StandingPool) -> None:
    with connect(pool):
        x = torch.ones(3, device="shoal")
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert x.sum().item() == 3


LEASES = """
    import contextlib, json, os, sys, time
    import torch
    import shoal

    def shared():
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sorted(name for name in found if "memfd:shoal" in name or "socket" in name)

    def threads():
        found = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
        return [t for t in found if t.startswith(("shoal-up", "shoal-down"))]

    def left():
        found = shared()
        for name in before:
            found.remove(name)
        return found

    before, workers = shared(), []
    for _ in range(3):
        lease = shoal.connect(memory="200MiB", transport="network")
        workers += lease.worker_pids
        torch.ones(3, device="shoal").sum().item()
        lease.close()
    deadline = time.monotonic() + 30  # threads of the last lease may still end
    while (left() or threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(json.dumps({"left": left(), "threads": threads(), "workers": workers}))
"""


def test_a_closed_lease_leaves_nothing(pool: StandingPool, member: tls.Identity) -> None:
    """In a program of its own: tensors that other tests left behind keep their sessions open."""
    out = programs.succeed(LEASES, SHOAL_POOL=pool.network_url, SHOAL_IDENTITY=str(member.path))
    told = json.loads(out)
    assert told["left"] == []
    assert told["threads"] == []
    for worker in told["workers"]:
        wait_until(lambda w=worker: not processes.alive(w), 8, "the worker has ended")  # type: ignore[misc]


@pytest.mark.slow
def test_the_device_tests_pass_over_the_network() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/device"],
        cwd=programs.ROOT,
        env=programs.environment(TRANSPORT="network"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
