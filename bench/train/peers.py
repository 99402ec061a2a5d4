"""The programs that `bench.train` compares: each rank is a process that runs steps when told to.

`python -m bench.train.peers ROLE MODEL RANK ADDRESS PORT SPEEDS` reads a number of steps from each line
of its input and answers with the seconds that they took. The ranks meet at the first one's ADDRESS;
SPEEDS are those of all: `1.0,0.45`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.models import Batch, Cnn, Gpt, Mlp, _pictures, _tokens, _vectors

#: name -> model, batch; sizes as in Mariana's three cases: convolutions, attention, large gradients
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "CNN": (lambda: Cnn(40, 6, 10), lambda: _pictures(64, 32)),
    "GPT": (lambda: Gpt(256, 4, 8, 256, 128), lambda: _tokens(16, 128, 256)),
    "MLP": (lambda: Mlp(1024, 7, 10), lambda: _vectors(256, 1024)),
}
MICRO_BATCHES = 8
MEET_TIMEOUT_S = 60.0
Step = Callable[[], None]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def made(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name]
    return model(), batch()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class Rank:
    """One of the processes of a peer."""

    number: int
    speeds: tuple[float, ...]  # of all
    address: str = "127.0.0.1"  # where they meet
    port: int = 0

    @property
    def speed(self) -> float:
        return self.speeds[self.number]

    @property
    def world(self) -> int:
        return len(self.speeds)

    def part(self, batch: Batch) -> Batch:
        """An equal part of the batch."""
        return batch[0].chunk(self.world)[self.number], batch[1].chunk(self.world)[self.number]

    def part_by_speed(self, batch: Batch) -> Batch:
        sizes = shares(len(batch[0]), self.speeds)
        return batch[0].split(sizes)[self.number], batch[1].split(sizes)[self.number]


def shares(samples: int, speeds: Sequence[float]) -> list[int]:
    """Whole samples in the proportion of the speeds; the last takes the rest.

    >>> shares(64, [1.0, 0.45])
    [44, 20]
    """
    sizes = [round(samples * speed / sum(speeds)) for speed in speeds]
    return [*sizes[:-1], samples - sum(sizes[:-1])]


def plain_step(model: nn.Module, batch: Batch, speed: float = 1.0) -> Step:
    """A step as people write it; a slow device rests after its forward and backward pass."""
    optimizer = adamw(model)

    def step() -> None:
        start = time.perf_counter()
        loss = loss_of(model(batch[0]), batch[1])
        if speed < 1:  # the backward pass takes about twice as long; its sum waits for this rank
            time.sleep((time.perf_counter() - start) * 3 * (1 / speed - 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def single(name: str, rank: Rank) -> Step:
    model, batch = made(name)
    return plain_step(model, batch)


def independent(name: str, rank: Rank) -> Step:
    """A part of the batch by the rank's speed, and nothing exchanged: the ceiling. A slow device takes
    its time for the whole step."""
    model, batch = made(name)
    quick = plain_step(model, rank.part_by_speed(batch))

    def step() -> None:
        start = time.perf_counter()
        quick()
        time.sleep((time.perf_counter() - start) * (1 / rank.speed - 1))

    return step


def in_step(name: str, rank: Rank) -> Step:
    """As `independent`, but both wait for each other after every step, as whoever sums gradients must:
    what that alone costs on a machine whose cores are now faster, now slower."""
    other = meet(rank)
    apart = independent(name, rank)

    def step() -> None:
        apart()
        other.send(b".")
        other.recv(1)

    return step


def meet(rank: Rank) -> socket.socket:
    """A connection between two ranks."""
    if rank.number == 0:
        with socket.create_server((rank.address, rank.port)) as door:
            return door.accept()[0]
    until = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((rank.address, rank.port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def ddp(name: str, rank: Rank) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model, batch = made(name)
    return plain_step(DistributedDataParallel(model), rank.part(batch), rank.speed)


def fsdp2(name: str, rank: Rank) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, batch = made(name)
    mesh = init_device_mesh("cpu", (rank.world,))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, rank.part(batch), rank.speed)


def pipelining(name: str, rank: Rank) -> Step:
    """torch.distributed.pipelining, 1F1B, cut into stages of about equal cost."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, batch = made(name)
    stage = in_stages(name, model)[rank.number]
    optimizer = adamw(stage)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank.number, rank.world, torch.device("cpu")),
        MICRO_BATCHES,
        loss_fn=loss_of,
    )

    def step() -> None:
        losses: list[Any] = []
        if rank.number == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Residual(nn.Module):
    """A block of `Mlp`, whose residual sum is written in its parent's forward."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(x))


class _Embed(nn.Module):
    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.token, self.place = model.token, model.place

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.place[: tokens.shape[1]]


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(2, 3))


def in_stages(name: str, model: nn.Module) -> list[nn.Module]:
    """The model cut in two by hand, as this peer asks its users to do."""
    if isinstance(model, Gpt):
        blocks = list(model.blocks)
        return [
            nn.Sequential(_Embed(model), *blocks[:2]),
            nn.Sequential(*blocks[2:], model.norm, model.head),
        ]
    if isinstance(model, Mlp):
        layers = [_Residual(block) for block in model.blocks]
        return [nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:], model.head)]
    assert isinstance(model, Cnn)
    body = list(model.body)
    return [nn.Sequential(*body[:5]), nn.Sequential(*body[5:], _Mean(), model.head)]


ROLES = {
    "one process": single,
    "two independent processes": independent,
    "two processes in step": in_step,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "pipelining 1F1B": pipelining,
}


def serve(run: Callable[[int], object]) -> None:
    """Runs steps when told to, and says how long they took."""
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    role, name, number, address, port, speeds = sys.argv[1:]
    rank = Rank(int(number), tuple(map(float, speeds.split(","))), address, int(port))
    torch.set_num_threads(1)
    if role in ("DDP", "FSDP2", "pipelining 1F1B"):
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo", rank=rank.number, world_size=rank.world)
    step = ROLES[role](name, rank)
    step()

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    serve(run)
    os._exit(0)  # no process group outlives its peers cleanly


if __name__ == "__main__":
    main()
