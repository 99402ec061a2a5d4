"""The child process of a peer: `python -m bench.peers.driver NAME`.

It reads one JSON line `{"task": …, "count": …}` after the other and answers with the seconds that
so many of the task took.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Protocol

from bench.measure import loop, nothing

ELEMENTS = 16
TRANSFER_BYTES = 16 << 20


class Peer(Protocol):
    """What every peer can do. Operands of 16 elements lie at the other side already."""

    def issue(self) -> object:
        """Starts an addition there; its result stays there."""

    def settle(self) -> object:
        """Waits until everything that was issued is done."""

    def read(self) -> object:
        """An addition there, and one number of its result here."""

    def send(self) -> object:
        """16 MiB to the other side, complete on return."""

    def fetch(self) -> object:
        """16 MiB from there."""

    def close(self) -> None: ...


#: name -> module with a function `start() -> Peer`
MODULES = {
    "torch.distributed.rpc": "bench.peers.torch_rpc",
    "Ray": "bench.peers.ray_actor",
    "mycelya-torch": "bench.peers.mycelya",
    "Monarch": "bench.peers.monarch_mesh",
}


def burst(peer: Peer, task: str, count: int) -> float:
    if task == "issue":
        return loop(peer.issue, peer.settle, timed_finish=False)(count)
    body = {"read": peer.read, "send": peer.send, "fetch": peer.fetch}[task]
    return loop(body, nothing)(count)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints must not mix with the answers
    import torch

    torch.set_num_threads(1)
    peer: Peer = importlib.import_module(MODULES[sys.argv[1]]).start()
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(burst(peer, request["task"], request["count"]), file=answers)
    peer.close()


if __name__ == "__main__":
    main()
