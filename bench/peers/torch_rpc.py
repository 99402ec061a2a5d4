"""torch.distributed.rpc: a worker process on loopback, operands as RRefs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
from torch.distributed import rpc

from bench.peers.driver import ELEMENTS, TRANSFER_BYTES, Peer

WORKER = "worker"
_kept: list[torch.Tensor] = []


def make(elements: int) -> torch.Tensor:
    return torch.ones(elements)


def add(a: rpc.RRef, b: rpc.RRef) -> torch.Tensor:
    return a.local_value() + b.local_value()


def add_and_read(a: rpc.RRef, b: rpc.RRef) -> float:
    return (a.local_value() + b.local_value())[0].item()


def keep(x: torch.Tensor) -> None:
    _kept[:] = [x]


def kept() -> torch.Tensor:
    return _kept[0]


def nothing() -> None:
    pass


def join(name: str, rank: int, port: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # TensorPipe would else choose a network card
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


class TorchRpc:
    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bench.peers.torch_rpc", str(port)]
        self.worker = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        join("client", 0, port)
        self.a = rpc.remote(WORKER, make, args=(ELEMENTS,))
        self.b = rpc.remote(WORKER, make, args=(ELEMENTS,))
        self.big = torch.ones(TRANSFER_BYTES // 4)

    def issue(self) -> rpc.RRef:
        self.last = rpc.remote(WORKER, add, args=(self.a, self.b))
        return self.last

    def settle(self) -> None:
        self.last.to_here()
        rpc.rpc_sync(WORKER, nothing)

    def read(self) -> float:
        return rpc.rpc_sync(WORKER, add_and_read, args=(self.a, self.b))

    def send(self) -> None:
        rpc.rpc_sync(WORKER, keep, args=(self.big,))

    def fetch(self) -> torch.Tensor:
        return rpc.rpc_sync(WORKER, kept)

    def close(self) -> None:
        self.a = self.b = self.last = None
        rpc.shutdown()
        self.worker.wait(10)


def start() -> Peer:
    return TorchRpc()


def main() -> None:
    torch.set_num_threads(1)
    # The functions that the client names must be those of the module that it imported.
    from bench.peers import torch_rpc

    torch_rpc.join(WORKER, 1, int(sys.argv[1]))
    rpc.shutdown()  # waits for the client


if __name__ == "__main__":
    main()
