"""Sessions are suspended in place: their memory goes to the host and comes back, and nothing else
changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.pool.client.head_connection import ask
from shoal.pool.wire import messages
from shoal.pool.wire.profile_messages import SessionProfile
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def paging_pool() -> Iterator[shoal.Pool]:
    with shoal.up(["cpu,memory=256MiB,host=512MiB,disk=0,threads=1,name=only"]) as pool:
        yield pool


@pytest.fixture
def lease(paging_pool: shoal.Pool) -> Iterator[shoal.Lease]:
    with shoal.connect(paging_pool.url) as lease:
        yield lease


def order(lease: shoal.Lease, suspend: bool) -> None:
    number = lease.granted[0].session
    status = answer_of(lease, messages.AskStatus())
    assert isinstance(status, messages.PoolStatus)
    mine = next(s.lease for s in status.sessions if s.session == number)
    assert isinstance(answer_of(lease, messages.OrderLease(mine, suspend)), messages.Done)


def answer_of(lease: shoal.Lease, request: messages.FromClient) -> messages.FromHead:
    connection, answer = ask(lease.url, request)
    connection.close()
    return answer


def profile_of(lease: shoal.Lease) -> SessionProfile:
    granted = lease.granted[0]
    answer = answer_of(lease, messages.AskSessionProfile((granted.info.number, granted.session)))
    assert isinstance(answer, SessionProfile)
    return answer


def until_state(lease: shoal.Lease, state: str) -> SessionProfile:
    wait_until(lambda: profile_of(lease).state == state, 30, f"the session is {state}")
    return profile_of(lease)


def train(steps: int, at_step: threading.Event | None = None) -> list[float]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.Dropout(0.4), torch.nn.ReLU(), torch.nn.Linear(512, 8)
    ).to("shoal")
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.rand(32, 64, device="shoal")
    losses = []
    for step in range(steps):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if at_step is not None and step == 10:
            at_step.set()
    return [loss.item() for loss in losses]


def test_a_training_with_dropout_is_equal_bit_for_bit(
    paging_pool: shoal.Pool, lease: shoal.Lease
) -> None:
    expected = train(60)
    for _ in range(2):
        assert train_suspended(lease) == expected
        until_state(lease, "running")


def train_suspended(lease: shoal.Lease) -> list[float]:
    found: list[float] = []
    begun = threading.Event()
    thread = threading.Thread(target=lambda: found.extend(train(60, begun)))
    thread.start()
    assert begun.wait(30)
    order(lease, suspend=True)
    profile = until_state(lease, "suspended")
    assert profile.used_bytes < MiB
    assert profile.limit_bytes < MiB
    order(lease, suspend=False)
    thread.join(60)
    return found


def test_a_suspended_program_waits_and_its_values_come_back(lease: shoal.Lease) -> None:
    big = torch.arange(8 * MiB, dtype=torch.float64, device="shoal")
    small = torch.arange(5, device="shoal")
    pinned = torch.ones(4 * MiB, dtype=torch.uint8).pin_memory().to("shoal")
    big.sum().item()
    order(lease, suspend=True)
    profile = until_state(lease, "suspended")
    assert profile.used_bytes < MiB
    assert profile.away_bytes >= 64 * MiB  # the host's now
    read: list[float] = []
    reader = threading.Thread(target=lambda: read.append(big.sum().item()))
    reader.start()
    reader.join(0.5)
    assert reader.is_alive()  # longer than a heartbeat: nobody takes the session for lost
    order(lease, suspend=False)
    reader.join(30)
    assert read == [float(sum(range(8 * MiB)))]
    until_state(lease, "running")
    assert torch.equal(big.cpu(), torch.arange(8 * MiB, dtype=torch.float64))
    assert small.tolist() == [0, 1, 2, 3, 4]
    assert pinned.sum().item() == 4 * MiB
    assert profile_of(lease).state == "running"


def test_a_client_that_reads_in_place_never_sees_freed_memory(lease: shoal.Lease) -> None:
    """Reads without a message race with the memory's way out and back."""
    values = torch.arange(2 * MiB, dtype=torch.int64)
    held = values.to("shoal") + 0
    stop = threading.Event()
    wrong = []

    def read() -> None:
        while not stop.is_set():
            if not torch.equal(held.cpu(), values):
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5):
        order(lease, suspend=True)
        until_state(lease, "suspended")
        order(lease, suspend=False)
        until_state(lease, "running")
    stop.set()
    reader.join(30)
    assert not wrong


def test_a_session_that_shares_memory_says_why_it_cannot_be_suspended(lease: shoal.Lease) -> None:
    shared = torch.ones(1024, device="shoal")
    shoal.share(shared)
    torch.ones(3, device="shoal").sum().item()
    order(lease, suspend=True)
    assert until_state(lease, "refused").reason == "shares"
    assert torch.ones(3, device="shoal").sum().item() == 3  # it runs on
    order(lease, suspend=False)
    until_state(lease, "running")


def test_a_host_without_room_refuses() -> None:
    with (
        shoal.up(["cpu,memory=128MiB,host=16MiB,disk=0,threads=1"]) as pool,
        shoal.connect(pool.url) as lease,
    ):
        held = torch.ones(16 * MiB, device="shoal")
        held.sum().item()
        order(lease, suspend=True)
        assert until_state(lease, "refused").reason == "host-full"
        assert held.sum().item() == 16 * MiB


def test_a_suspended_session_ends_with_its_client(paging_pool: shoal.Pool) -> None:
    with shoal.connect(paging_pool.url) as lease:
        torch.ones(1024 * 1024, device="shoal").sum().item()
        order(lease, suspend=True)
        until_state(lease, "suspended")
    with shoal.connect(paging_pool.url):  # the whole device is free again
        assert torch.ones(3, device="shoal").sum().item() == 3
