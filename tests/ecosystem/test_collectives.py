"""torch.distributed with tensors of the device: two ranks, each with a lease of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import shoal
from tests.ecosystem import programs

RANKS = """
    import json, os, socket, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

    def training(rank, device):
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(rank)  # DDP sends rank 0's weights to the others
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(10 + rank)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(5, 4, generator=generator).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def collectives(rank, device):
        def of(*values):
            return torch.tensor(values, dtype=torch.float32, device=device)
        found = {}
        x = of(rank + 1, 2)
        dist.all_reduce(x)
        found["all_reduce"] = x.tolist()
        x = of(rank + 1, 5)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
        found["maximum, async"] = x.tolist()
        x = of(rank, rank)
        dist.broadcast(x, src=1)
        found["broadcast"] = x.tolist()
        parts = [of(0, 0), of(0, 0)]
        dist.all_gather(parts, of(rank, 7))
        found["all_gather"] = [p.tolist() for p in parts]
        out = of(0, 0, 0, 0)
        dist.all_gather_single(out, of(rank, 7))
        found["all_gather_single"] = out.tolist()
        out = of(0, 0)
        dist.reduce_scatter(out, [of(1, 2), of(3, rank)])
        found["reduce_scatter"] = out.tolist()
        dist.reduce_scatter_single(out, of(1, 2, 3, rank))
        found["reduce_scatter_single"] = out.tolist()
        x = of(3, rank)
        dist.reduce(x, dst=0)
        found["reduce"] = x.tolist() if rank == 0 else None
        if rank == 0:
            dist.send(of(4, 4), dst=1)
        else:
            dist.recv(x, src=0)
            found["recv"] = x.tolist()
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        found["all_gather_object"] = objects
        shared = [f"from {rank}"]
        dist.broadcast_object_list(shared, src=0)
        found["broadcast_object_list"] = shared
        group = dist.new_group([0, 1])
        x = of(rank)
        dist.all_reduce(x, group=group)
        found["a group"] = x.tolist()
        dist.barrier()
        return found

    def work(rank, port, device, backend, directory):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                       "WORLD_SIZE": "2"}
        dist.init_process_group(backend or None)
        found = {"training": training(rank, device), **collectives(rank, device),
                 "host tensors": collectives(rank, "cpu")}
        dist.destroy_process_group()
        with open(f"{directory}/{rank}.json", "w") as file:
            json.dump(found, file)

    if __name__ == "__main__":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        home = os.environ["HOME"]
        mp.spawn(work, (port, os.environ["DEVICE"], os.environ["BACKEND"], home), nprocs=2)
        print(json.dumps([json.load(open(f"{home}/{rank}.json")) for rank in range(2)]))
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    with shoal.up(["cpu,memory=256MiB,threads=1", "cpu,memory=256MiB,threads=1"]) as made:
        yield made


@pytest.fixture(scope="module")
def local() -> Any:
    """What two ranks find on the CPU with gloo, without Shoal."""
    found = programs.run(RANKS, env={"DEVICE": "cpu", "BACKEND": "gloo"}, installed=False)
    assert found["error"] is None, found["err"]
    return found["answer"]


@pytest.mark.parametrize(
    "backend",
    [
        "",
        pytest.param("shoal", marks=pytest.mark.slow),
        pytest.param("cpu:gloo,shoal:shoal", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_find_what_gloo_finds(pool: shoal.Pool, local: Any, backend: str) -> None:
    env = {"DEVICE": "shoal", "BACKEND": backend, "SHOAL_POOL": pool.url}
    found = programs.run(RANKS, env=env)
    assert found["error"] is None, found["err"]
    for remote, expected in zip(found["answer"], local, strict=True):
        assert remote.pop("training") == pytest.approx(expected["training"], rel=1e-5)
        assert remote == {k: v for k, v in expected.items() if k != "training"}
