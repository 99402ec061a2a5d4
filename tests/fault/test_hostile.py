"""A client that lies: its worker refuses or ends, and nobody else ever notices."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator

import pytest
import torch

import shoal
from tests.support import processes, programs
from tests.support.raw_client import (
    MASK,
    RING_BYTES,
    Ended,
    Error,
    Kind,
    RawClient,
    message,
    prepare,
    tag,
    tensor,
    text_words,
)
from tests.support.waiting import wait_until

MiB = 2**20


class Bystander:
    """Another session of the same device server, which must never notice anything."""

    def __init__(self, pool: shoal.Pool) -> None:
        self.pool = pool
        self.lease = shoal.connect(pool.url, memory="256MiB")
        self.data = torch.arange(100_000.0, device="shoal")
        self.server = processes.server_pids(pool.url)[0]

    def check(self) -> None:
        assert self.lease.active
        assert torch.equal(self.data.cpu(), torch.arange(100_000.0))
        assert (self.data[:10] + 1).sum().item() == 55
        assert processes.server_pids(self.pool.url) == [self.server]
        assert all(processes.alive(p) for p in (self.server, *self.lease.worker_pids))


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    with shoal.up(["cpu,memory=1GiB,host=0,disk=0,threads=1"]) as made:
        yield made


@pytest.fixture(scope="module")
def bystander(pool: shoal.Pool) -> Iterator[Bystander]:
    other = Bystander(pool)
    yield other
    other.lease.close()


@pytest.fixture
def raw(pool: shoal.Pool, bystander: Bystander) -> Iterator[RawClient]:
    """A hostile session beside the bystander's; afterwards a fresh one must still be possible."""
    with RawClient(pool.url) as client:
        yield client
    bystander.check()
    wait_until(lambda: not processes.alive(client.worker_pid), 8, "the session's worker is gone")
    with RawClient(pool.url) as again:
        assert again.outcome(message(Kind.SYNC)) == (Error.NONE, "")


def test_the_raw_client_can_be_honest(raw: RawClient) -> None:
    """Else the tests below would pass for the wrong reason."""
    x, y = raw.address(1), raw.address(2)
    raw.send(message(Kind.ALLOCATE, x, 16))
    raw.send(message(Kind.WRITE, x, 16, 0x3F8000003F800000, 0x3F8000003F800000))  # 1, 1, 1, 1
    raw.send(prepare(0, "aten::add.Tensor", ADD, FRESH))
    raw.send(message(Kind.CALL, 0 | (1 << 32), x, x, 1, y))
    error, data = raw.request(message(Kind.READ, y, 16))
    assert (error, data) == (Error.NONE, [0x4000000040000000] * 2)  # 2, 2, 2, 2


# --- single lies --------------------------------

# aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
ADD = [*tensor(4), *tensor(4), tag(5)]
FRESH = [tag(0, 6, 1), 4, 1]

ABSURD = [
    message(0xFFFF),
    message(26),
    message(Kind.ALLOCATE),
    message(Kind.ALLOCATE, 0, 8),
    message(Kind.ALLOCATE, MASK, 8),
    message(Kind.FREE, 12345),
    message(Kind.WRITE, 1 << 30, 8, 1),
    message(Kind.READ, 1 << 30, 8),
    message(Kind.LOCATE, MASK, MASK),
    message(Kind.CALL, 77),
    message(Kind.CALL, MASK, MASK),
    message(Kind.BIND, MASK),
    message(Kind.BIND, 3, 1, 2, 3),
    message(Kind.BACKWARD, 9, 9),
    message(Kind.GENERATOR_SET, 0, 8, 1),
    message(Kind.GENERATOR_SET, 0, MASK),
    message(Kind.EVENT_ELAPSED, 1, 2),
    message(Kind.COPY_WITHIN, 1, 2, 3),
    message(Kind.LOAD),
    message(Kind.LOAD, 1 << 30, 8, 7, 0),
    message(Kind.LOAD, MASK, MASK, MASK, MASK),
    message(Kind.SETTINGS),
    message(Kind.SETTINGS, 6, MASK, *[0] * 19),
    message(Kind.SETTINGS, 3, 0, *[0] * 19),  # a default dtype of integers
    message(Kind.SETTINGS, 6, 0, 9, *[0] * 18),
    message(Kind.SETTINGS, 6, 0, *[0] * 7, 1, 1, 2, 3, 4, *[0] * 7),
    message(Kind.PREPARE, MASK, MASK),
    message(Kind.PREPARE, 1 << 20, 0),
    message(Kind.PREPARE, 0 | (4000 << 32), 0, *[0] * 500),
]


@pytest.mark.parametrize("words", ABSURD, ids=lambda w: f"{w[0] >> 32 & 0xFFFF}-{len(w)}")
def test_absurd_messages_are_protocol_errors(raw: RawClient, words: list[int]) -> None:
    error, text = raw.outcome(words)
    assert error != Error.NONE
    assert text
    assert raw.outcome(message(Kind.SYNC)) == (Error.NONE, "")  # the worker goes on


def test_addresses_and_extents_are_checked(raw: RawClient) -> None:
    x = raw.address(5)
    assert raw.outcome(message(Kind.ALLOCATE, x, 64)) == (Error.NONE, "")
    other_session = ((raw.session ^ 1) << 52) | (5 << 30)
    for words in (
        message(Kind.READ, x, 72),
        message(Kind.READ, x + 60, 8),
        message(Kind.READ, x + 64, 1),
        message(Kind.READ, x, MASK),
        message(Kind.READ, x - 8, 8),
        message(Kind.READ, raw.address(6), 8),
        message(Kind.READ, other_session, 8),
        message(Kind.WRITE, x + 63, 8, 0),
        message(Kind.WRITE, x, 4096, 0),
        message(Kind.COPY_IN, x, 64, MiB - 8),
        message(Kind.COPY_IN, x, 64, MASK - 8),
        message(Kind.COPY_OUT, x, 65, 0),
        message(Kind.COPY_WITHIN, x + 8, x, 64),
        message(Kind.ADOPT, raw.address(7), 64, MiB),
        message(Kind.ADOPT, raw.address(7), MASK, 0),
        message(Kind.ALLOCATE, x + 8, 8),
        message(Kind.FREE, x + 8),
        message(Kind.FREE, other_session),
        message(Kind.LOCATE, x, 65),
    ):
        error, text = raw.outcome(words)
        assert error == Error.PROTOCOL, (words, error, text)
    assert raw.request(message(Kind.READ, x, 64))[0] == Error.NONE


def test_a_quota_holds_in_the_worker(raw: RawClient) -> None:
    for size in (33 * MiB, 1 << 40, 1 << 62, MASK):
        error, _ = raw.outcome(message(Kind.ALLOCATE, raw.address(3), size))
        assert error in (Error.OUT_OF_MEMORY, Error.PROTOCOL, Error.RUNTIME)
    for slot in range(10, 20):
        raw.send(message(Kind.ALLOCATE, raw.address(slot), 8 * MiB))
    error, _ = raw.request(message(Kind.SYNC))
    assert error == Error.OUT_OF_MEMORY
    _, stats = raw.request(message(Kind.STATS))
    assert stats[0] <= 32 * MiB


@pytest.mark.parametrize(
    "shape",
    [
        tensor(2**62, 4),
        tensor(2**32, 2**32),
        tensor(-1),
        tensor(4, strides=[-1]),
        tensor(4, strides=[2**62]),
        tensor(2**63 - 1, strides=[2**63 - 1]),
        tensor(1000),
        tensor(*[1] * 65),
        tensor(4, dtype=200),
        tensor(4, dtype=12),  # quantized
        tensor(4, dtype=7),  # float64: twice the bytes
        [tag(2, 6, 255), 1, 1],
    ],
    ids=str,
)
def test_shapes_that_lie(raw: RawClient, shape: list[int]) -> None:
    x = raw.address(1)
    raw.send(message(Kind.ALLOCATE, x, 16))
    raw.send(prepare(1, "aten::neg", shape, FRESH))
    error, text = raw.outcome(message(Kind.CALL, 1 | (1 << 32), x, raw.address(2)))
    assert error != Error.NONE
    assert text


@pytest.mark.parametrize(
    "outputs",
    [
        [tag(0, 6, 1), 2**62, 4],
        [tag(0, 6, 1), 5, 1],
        [tag(0, 7, 1), 4, 1],
        [tag(0, 6, 2), 2, 2, 2, 1],
        [tag(2, n=9)],
        [tag(4, n=2**31)],
        [tag(77)],
        [tag(3)],
        [],
        FRESH * 2,
    ],
    ids=str,
)
def test_outputs_that_lie(raw: RawClient, outputs: list[int]) -> None:
    x = raw.address(1)
    raw.send(message(Kind.ALLOCATE, x, 16))
    raw.send(prepare(1, "aten::neg", tensor(4), outputs))
    for count in (0, 1, 2, 2**20):
        addresses = [raw.address(20 + i) for i in range(min(count, 4))]
        raw.send(message(Kind.CALL, 1 | (count << 32), x, *addresses))
    raw.request(message(Kind.SYNC))
    assert raw.outcome(message(Kind.SYNC)) == (Error.NONE, "")


@pytest.mark.parametrize(
    "name",
    [
        "aten::from_file",
        "aten::from_file.out",
        "aten::set_.source_Tensor",
        "aten::set_data",
        "aten::resize_",
        "aten::_print",
        "aten::_test_optional_intlist",
        "aten::record_stream",
        "prim::Print",
        "c10d::allreduce_",
        "profiler::_record_function_enter",
        "inductor::_alloc_from_pool",
        "nosuch::thing",
        "aten::nosuchthing",
        "",
        "::",
        "aten",
        "aten::add.NoSuchOverload",
        "\0\0\0",
        "x" * 256,
    ],
)
def test_operators_that_are_not_allowed(raw: RawClient, name: str, tmp_path: object) -> None:
    raw.send(prepare(2, name, [], []))
    error, text = raw.outcome(message(Kind.CALL, 2))
    assert error in (Error.NOT_IMPLEMENTED, Error.PROTOCOL, Error.RUNTIME)
    assert text


def test_a_file_is_never_opened(raw: RawClient, tmp_path: object) -> None:
    secret = f"{tmp_path}/created"
    # from_file(str filename, bool? shared, int? size, dtype, layout, device, pin_memory)
    template = [tag(10, n=len(secret)), *text_words(secret.encode()), tag(9, 1), tag(4), 8]
    template += [tag(0)] * 4
    raw.send(prepare(3, "aten::from_file", template, [tag(0, 6, 1), 8, 1]))
    error, text = raw.outcome(message(Kind.CALL, 3 | (1 << 32), raw.address(9)))
    assert error == Error.NOT_IMPLEMENTED
    assert "refused" in text
    assert not os.path.exists(secret)


def test_absurd_counts(raw: RawClient) -> None:
    big = 2**31
    for words in (
        message(Kind.PREPARE, 5 | (8 << 32), big | (big << 32), 0),
        prepare(5, "aten::cat", [tag(11, n=2**32 - 1)], FRESH),
        prepare(5, "aten::cat", [tag(11, n=1)] * 40, FRESH),
        prepare(5, "aten::add.Tensor", ADD * 50, FRESH),
        prepare(5, "aten::add.Tensor", [], FRESH),
        prepare(5, "aten::add.Tensor", [tag(200)] * 3, FRESH),
        prepare(5, "aten::neg", [tag(10, n=2**32 - 1)], FRESH),
    ):
        raw.send(words)
        error, _ = raw.outcome(message(Kind.CALL, 5 | (1 << 32), raw.address(1)))
        assert error != Error.NONE
    for number in range(5000):
        raw.send(message(Kind.SEED, number, 1))
        raw.send(message(Kind.EVENT_RECORD, number))
    raw.request(message(Kind.SYNC))
    assert raw.outcome(message(Kind.SYNC)) == (Error.NONE, "")


def test_templates_cannot_fill_the_machines_memory(raw: RawClient) -> None:
    """Prepared calls live outside of the leased memory, so they need a limit of their own."""
    template = [tag(11, n=60_000), *[tag(1)] * 60_000, tag(4), 0]
    try:
        for number in range(200):
            raw.send(prepare(number, "aten::cat", template, FRESH))
        raw.request(message(Kind.SYNC))
    except Ended:
        return  # ending the session is a limit as well
    with open(f"/proc/{raw.worker_pid}/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    assert resident < 1000 * MiB


# --- the ring itself --------------------------------


@pytest.mark.parametrize(
    "first",
    [
        0,
        4,
        12 | (20 << 32),
        (RING_BYTES + 8) | (20 << 32),
        (2**32 - 8) | (20 << 32),
        ((1 << 19) + 8) | (20 << 32),
        MASK,
    ],
    ids=hex,
)
def test_a_broken_frame_ends_only_its_own_session(raw: RawClient, first: int) -> None:
    raw.send([first, 0, 0, 0])
    wait_until(raw.ended, 30, "the worker gave up the stream")


@pytest.mark.parametrize("tail", [3, 2 * RING_BYTES, MASK, MASK - 7])
def test_a_tail_out_of_range(raw: RawClient, tail: int) -> None:
    raw.requests.put(0, tail)
    wait_until(raw.ended, 30, "the worker gave up the stream")


def test_a_client_that_never_reads_its_replies(raw: RawClient) -> None:
    raw.send(message(Kind.ALLOCATE, raw.address(1), 4096))
    for _ in range(400):  # more than the reply ring holds: the worker waits, alone
        raw.send(message(Kind.READ, raw.address(1), 4096))
    raw.replies.put(64, MASK)  # and a lie about how far they were read


# --- random and mutated streams --------------------------------


def honest(client: RawClient) -> list[list[int]]:
    """A little of everything, to be mutated."""
    x, y = client.address(1), client.address(2)
    return [
        message(Kind.ALLOCATE, x, 16),
        message(Kind.WRITE, x, 16, 1, 2),
        prepare(0, "aten::add.Tensor", ADD, FRESH),
        message(Kind.CALL, 0 | (1 << 32), x, x, 1, y),
        prepare(1, "aten::cat", [tag(11, n=2), *tensor(4), *tensor(4), tag(4), 0], []),
        message(Kind.CALL, 1, x, x, flags=1),
        message(Kind.BIND, 1, client.address(3)),
        prepare(2, "aten::index_select", [*tensor(4), tag(4), 0, *tensor(2, dtype=4)], []),
        message(Kind.CALL, 2, x, x, flags=1),
        prepare(3, "aten::as_strided", [*tensor(4), tag(11, n=0), tag(11, n=0), tag(0)], []),
        message(Kind.COPY_IN, x, 16, 64),
        message(Kind.COPY_OUT, x, 16, 64),
        message(Kind.LOAD, x, 16, 9, 64),
        message(Kind.READ, y, 16),
        message(Kind.LOCATE, y, 16),
        message(Kind.GENERATOR_GET, 0),
        message(Kind.EVENT_RECORD, 1),
        message(Kind.EVENT_ELAPSED, 1, 1),
        message(Kind.ADOPT, client.address(4), 16, 0),
        message(Kind.FREE, client.address(4)),
        message(Kind.STATS),
        message(Kind.TRIM),
        message(Kind.SYNC),
    ]


def interesting(dice: random.Random, client: RawClient) -> int:
    return dice.choice(
        [
            0,
            1,
            2,
            8,
            16,
            255,
            4096,
            2**31,
            2**32 - 1,
            2**32,
            2**62,
            2**63,
            MASK,
            MASK - 7,
            client.address(dice.randrange(8), dice.randrange(64)),
            dice.getrandbits(64),
            tag(dice.randrange(16), dice.randrange(256), dice.randrange(4), dice.randrange(16)),
        ]
    )


def pump(client: RawClient, streams: Iterator[list[int]]) -> bool:
    """Sends messages and reads what comes back; False if the worker ended."""
    try:
        for words in streams:
            client.send(words)
            while client.replies.get(0) > client.read_at:
                client.receive()
        client.request(message(Kind.SYNC))
    except Ended:
        return False
    return True


@pytest.mark.parametrize("seed", range(6))
def test_random_messages(raw: RawClient, seed: int) -> None:
    dice = random.Random(seed)

    def stream() -> Iterator[list[int]]:
        for _ in range(1500):
            words = [interesting(dice, raw) for _ in range(dice.randrange(1, 12))]
            yield message(dice.randrange(1, 28), *words, flags=dice.choice([0, 0, 1, 2, 3, 0xFFFF]))

    # Framing is right, so nothing here is a reason to end: each message is refused by itself.
    assert pump(raw, stream())


@pytest.mark.parametrize("seed", range(6))
def test_mutated_streams(raw: RawClient, seed: int) -> None:
    dice = random.Random(100 + seed)

    def stream() -> Iterator[list[int]]:
        for _ in range(60):
            for words in honest(raw):
                mutated = list(words)
                if dice.random() < 0.3:
                    at = dice.randrange(1, len(mutated)) if len(mutated) > 1 else 0
                    mutated[at] = interesting(dice, raw) if at else mutated[at]
                if dice.random() < 0.1:
                    at = dice.randrange(len(mutated))
                    mutated = mutated[: at + 1]
                if dice.random() < 0.05:
                    mutated += [interesting(dice, raw)]
                kind, flags = mutated[0] >> 32 & 0xFFFF, mutated[0] >> 48
                yield message(kind, *mutated[1:], flags=flags)

    pump(raw, stream())  # an operator with mad arguments may end its worker; only that one


def test_random_bytes_in_the_ring(raw: RawClient) -> None:
    dice = random.Random(7)
    raw.requests.map[256 : 256 + RING_BYTES] = dice.randbytes(RING_BYTES)
    raw.requests.put(0, RING_BYTES // 2)
    wait_until(raw.ended, 30, "the worker gave up the stream")


BREAKS_ITS_STREAM = """
import shoal
from tests.support.raw_client import Ended, Kind, RawClient, header
with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool, RawClient(pool.url) as raw:
    try:
        raw.send([header(Kind.SYNC, 0xFFFFFF)])
        raw.receive()
    except Ended:
        print("ended")
"""


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_worker_logs_why_it_ends_a_session(kind: str) -> None:
    """In the format of all other log lines, although no Python runs in that thread."""
    done = programs.run(BREAKS_ITS_STREAM, SHOAL_LOG=kind)
    assert done.out == "ended\n", done.err
    found = [line for line in done.err.splitlines() if "worker[cpu" in line and " ends: " in line]
    assert len(found) == 1, done.err
    if kind == "json":
        fields = json.loads(found[0])
        assert fields["level"] == "ERROR"
        assert fields["time"].endswith("Z")
        assert fields["text"].startswith("session ")
    else:
        assert re.fullmatch(r"[-\dT:.]+Z ERROR worker\[cpu[^]]*\]: session \d+ ends: .+", found[0])
