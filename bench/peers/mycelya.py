"""mycelya-torch with its mock provider, which has no process boundary: a lower bound.

It claims torch's PrivateUse1 device as shoal does, so both never share a process.
"""

from __future__ import annotations

import torch
from mycelya_torch import RemoteMachine

from bench.peers.driver import ELEMENTS, TRANSFER_BYTES, Peer


class Mycelya:
    def __init__(self) -> None:
        self.machine = RemoteMachine("mock")
        self.device = self.machine.device("cpu")
        self.a = torch.ones(ELEMENTS).to(self.device)
        self.b = torch.ones(ELEMENTS).to(self.device)
        self.big = torch.ones(TRANSFER_BYTES // 4)
        self.there = self.big.to(self.device)

    def issue(self) -> torch.Tensor:
        return self.a + self.b

    def settle(self) -> float:
        return self.read()

    def read(self) -> float:
        return (self.a + self.b)[0].item()

    def send(self) -> float:
        self.there = self.big.to(self.device)
        return self.there[0].item()  # a read is the only way to wait

    def fetch(self) -> torch.Tensor:
        return self.there.cpu()

    def close(self) -> None:
        self.machine.stop()


def start() -> Peer:
    return Mycelya()
