"""Streams that the fuzzer (fuzz/executor_fuzz.cpp) found interesting, sent to a real worker.

With the sanitizers the fuzzer replaces operators by empty ones; here they run. A worker may refuse or
end its session; the device server and other sessions must not notice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import torch

import shoal
from tests.support.raw_client import Ended, Kind, RawClient, message

CORPUS = Path(__file__).parent / "corpus" / "executor.bin"
CORPUS_SESSION = 5  # in the corpus' addresses; replaced by the real one


def streams() -> Iterator[list[list[int]]]:
    """The corpus: streams end with a zero word, messages start with their length in words."""
    data = CORPUS.read_bytes()
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    stream: list[list[int]] = []
    at = 0
    while at < len(words):
        count = words[at]
        if count == 0:
            yield stream
            stream = []
        else:
            stream.append(list(words[at + 1 : at + 1 + count]))
        at += 1 + count


def readdressed(word: int, session: int) -> int:
    """The same place in the session that really is."""
    if word >> 52 != CORPUS_SESSION:
        return word
    return (session << 52) | (word & ((1 << 52) - 1))


def send_all(client: RawClient, stream: list[list[int]]) -> None:
    for words in stream:
        if (words[0] >> 32) & 0xFFFF == 0:
            continue  # padding has no number, and would shift those of all that follow
        body = [readdressed(w, client.session) for w in words[1:]]
        kind_and_flags = words[0] & ~0xFFFFFFFF
        client.send([kind_and_flags | (8 * (1 + len(body))), *body])


def test_corpus_harms_nobody() -> None:
    found = list(streams())
    assert len(found) > 100
    survived = 0
    with shoal.up(["cpu,memory=1GiB,threads=1"]) as pool:
        lease = shoal.connect(pool.url, memory="256MiB")
        data = torch.arange(1000.0, device="shoal")
        client = RawClient(pool.url)
        for stream in found:
            try:
                send_all(client, stream)
                client.request(message(Kind.SYNC))
                survived += 1
            except Ended:
                client.__exit__(None, None, None)
                client = RawClient(pool.url)
        client.__exit__(None, None, None)
        assert data.sum().item() == 499500
        assert lease.active
        lease.close()
    assert survived > len(found) // 2
