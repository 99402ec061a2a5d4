"""Ray: one actor that holds torch tensors; operands are objects of the actor's store."""

from __future__ import annotations

from typing import Any

import ray
import torch

from bench.peers.driver import ELEMENTS, TRANSFER_BYTES, Peer


class Holder:
    """Runs in the actor's process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.kept: list[torch.Tensor] = []

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def read(self, a: torch.Tensor, b: torch.Tensor) -> float:
        return (a + b)[0].item()

    def keep(self, x: torch.Tensor) -> None:
        self.kept[:] = [x]

    def fetch(self) -> torch.Tensor:
        return self.kept[0]


class RayActor:
    def __init__(self) -> None:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.actor: Any = ray.remote(Holder).remote()
        self.a, self.b = ray.put(torch.ones(ELEMENTS)), ray.put(torch.ones(ELEMENTS))
        self.big = torch.ones(TRANSFER_BYTES // 4)
        self.read()

    def issue(self) -> Any:
        self.last = self.actor.add.remote(self.a, self.b)
        return self.last

    def settle(self) -> Any:
        return ray.get(self.last)

    def read(self) -> float:
        return ray.get(self.actor.read.remote(self.a, self.b))

    def send(self) -> None:
        ray.get(self.actor.keep.remote(self.big))

    def fetch(self) -> torch.Tensor:
        return ray.get(self.actor.fetch.remote())

    def close(self) -> None:
        ray.shutdown()


def start() -> Peer:
    return RayActor()
