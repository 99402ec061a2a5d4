"""Monarch's tensor engine on a mesh of one process, and an actor for transfers."""

from __future__ import annotations

from typing import Any

import monarch
import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.mesh_controller import spawn_tensor_engine

from bench.peers.driver import ELEMENTS, TRANSFER_BYTES, Peer


class Holder(Actor):
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.kept = torch.empty(0)

    @endpoint
    def keep(self, x: torch.Tensor) -> None:
        self.kept = x

    @endpoint
    def fetch(self) -> torch.Tensor:
        return self.kept


class Mesh:
    def __init__(self) -> None:
        self.mesh = spawn_tensor_engine(this_host().spawn_procs(per_host={"gpus": 1}))
        with self.mesh.activate():
            self.a, self.b = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
        self.big = torch.ones(TRANSFER_BYTES // 4)
        self.holder: Any = this_host().spawn_procs(per_host={"gpus": 1}).spawn("holder", Holder)
        self.send()

    def issue(self) -> torch.Tensor:
        with self.mesh.activate():
            return self.a + self.b

    def settle(self) -> Any:
        return self.read()

    def read(self) -> Any:
        with self.mesh.activate():
            result = monarch.inspect(self.a + self.b)
        return result[0].item()

    def send(self) -> None:
        self.holder.keep.call_one(self.big).get()

    def fetch(self) -> torch.Tensor:
        return self.holder.fetch.call_one().get()

    def close(self) -> None:
        self.mesh.exit()


def start() -> Peer:
    return Mesh()
