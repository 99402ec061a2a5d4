"""The programs that `bench.train` compares: each rank is a process that runs steps when told to.

`python -m bench.train_peers ROLE MODEL RANK WORLD PORT SPEED` reads a number of steps from each line
of its input and answers with the seconds that they took.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
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
Step = Callable[[], None]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def made(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name]
    return model(), batch()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def part(batch: Batch, rank: int, world: int) -> Batch:
    return batch[0].chunk(world)[rank], batch[1].chunk(world)[rank]


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


def single(name: str, rank: int, world: int, speed: float) -> Step:
    model, batch = made(name)
    return plain_step(model, batch, speed)


def independent(name: str, rank: int, world: int, speed: float) -> Step:
    """A part of the batch and nothing exchanged: the ceiling."""
    model, batch = made(name)
    return plain_step(model, part(batch, rank, world), speed)


def ddp(name: str, rank: int, world: int, speed: float) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model, batch = made(name)
    return plain_step(DistributedDataParallel(model), part(batch, rank, world), speed)


def fsdp2(name: str, rank: int, world: int, speed: float) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, batch = made(name)
    mesh = init_device_mesh("cpu", (world,))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, part(batch, rank, world), speed)


def pipelining(name: str, rank: int, world: int, speed: float) -> Step:
    """torch.distributed.pipelining, 1F1B, cut into stages of about equal cost."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, batch = made(name)
    stage = in_stages(name, model)[rank]
    optimizer = adamw(stage)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of
    )

    def step() -> None:
        losses: list[Any] = []
        if rank == 0:
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
    "DDP": ddp,
    "FSDP2": fsdp2,
    "pipelining 1F1B": pipelining,
}


def main() -> None:
    role, name, rank, world, port, speed = sys.argv[1:]
    torch.set_num_threads(1)
    if role in ("DDP", "FSDP2", "pipelining 1F1B"):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo", rank=int(rank), world_size=int(world))
    step = ROLES[role](name, int(rank), int(world), float(speed))
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)
    os._exit(0)  # no process group outlives its peers cleanly


if __name__ == "__main__":
    main()
