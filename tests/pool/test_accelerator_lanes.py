"""Copies run beside operators, and nothing that issues work waits for the device, on the stand-in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.standin.environment import Options, Run
from tests.support import programs

MiB = 2**20


def environment(run: Run) -> dict[str, str]:
    found = run.environment()
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(programs.ROOT)])
    return found


@pytest.fixture(params=["late", pytest.param("random", marks=pytest.mark.slow)])
def late(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    run = Run(Options(request.param))
    yield environment(run)
    assert run.counts().races == 0
    run.close()


@pytest.fixture
def slow_copies() -> Iterator[dict[str, str]]:
    """A device that copies 16 MiB a second, beside operators."""
    run = Run(Options("threads"))
    yield {**environment(run), "STANDIN_COPY_BYTES_S": str(16 * MiB)}
    assert run.counts().races == 0
    run.close()


def test_every_mixture_of_copies_and_operators_is_in_order(late: dict[str, str]) -> None:
    """A random program of uploads, downloads, operators in place and frees, beside local torch."""
    source = """
        import random, torch, shoal
        random.seed(1)
        torch.manual_seed(1)
        sizes = [3, 2000, 300_000, 9_000_000]  # inline, small, large, over a border of 32 MiB
        with shoal.up(devices=["cuda:0,memory=512MiB"]) as pool, shoal.connect(pool.url):
            pairs, waiting = [], []
            for step in range(120):
                kind = random.choice("uuopwwfdc")
                if kind == "u" or not pairs:
                    size = random.choice(sizes[:3] if step % 20 else sizes)
                    local = torch.randn(size)
                    host = local.clone().pin_memory() if random.random() < 0.6 else local.clone()
                    pairs.append((local, host.to("shoal", non_blocking=True)))
                    continue
                place = random.randrange(len(pairs))
                local, there = pairs[place]
                if kind == "o":
                    pairs.append((local * 2, there * 2))
                elif kind == "p":
                    local.mul_(0.5), there.mul_(0.5)
                elif kind == "w":
                    fresh = torch.randn_like(local).pin_memory()
                    local.copy_(fresh), there.copy_(fresh, non_blocking=True)
                elif kind == "d":
                    out = torch.empty_like(local).pin_memory()
                    out.copy_(there, non_blocking=True)
                    waiting.append((local.clone(), out))
                elif kind == "c":  # through pinned memory and back, without a wait
                    out = torch.empty_like(local).pin_memory()
                    again = torch.empty_like(there)
                    out.copy_(there, non_blocking=True)
                    again.copy_(out, non_blocking=True)
                    out.copy_(there * 3, non_blocking=True)
                    pairs.append((local.clone(), again))
                    waiting.append((local * 3, out))
                elif kind == "f":
                    pairs.pop(place)
                if len(pairs) > 12:
                    pairs.pop(0)
                if step % 17 == 0:
                    assert there.flatten()[-1].item() == local.flatten()[-1].item()
            torch.shoal.synchronize()
            assert all(torch.equal(local, out) for local, out in waiting)
            assert all(torch.equal(local, there.cpu()) for local, there in pairs)
            counts = torch.shoal.traffic()
            print(counts["issued"] == counts["done"] > 0, len(waiting) > 5)
    """
    assert programs.succeed(source, **late).split() == ["True", "True"]


def test_a_copy_holds_up_neither_issuing_nor_reading(slow_copies: dict[str, str]) -> None:
    """An upload of four seconds runs. Calls behind it are issued, and a value of theirs is read."""
    source = """
        import time, torch, shoal
        with shoal.up(devices=["cuda:0,memory=512MiB"]) as pool, shoal.connect(pool.url):
            x = torch.randn(64, 64, device="shoal")
            weight = torch.empty(16 << 20).pin_memory()
            weight.fill_(2)
            there = torch.empty(16 << 20, device="shoal")
            torch.shoal.synchronize()
            start = torch.shoal.traffic()
            there.copy_(weight, non_blocking=True)
            copied = torch.shoal.traffic()["messages"]
            event = torch.Event("shoal")
            event.record()
            for _ in range(50):
                y = x @ x
            assert y.isfinite().all().item()
            reached = torch.shoal.traffic()
            print(reached["issued"] >= start["issued"] + 50, reached["done"] < copied)
            print(event.query())
            event.synchronize()
            print(torch.shoal.traffic()["done"] >= copied, event.query())
            print(there[-1].item())
    """
    assert programs.succeed(source, **slow_copies).split() == [
        "True", "True", "False", "True", "True", "2.0",
    ]  # fmt: skip


def test_a_pinned_tensor_that_goes_while_it_is_copied_is_not_used_again(
    slow_copies: dict[str, str],
) -> None:
    source = """
        import torch, shoal
        with shoal.up(devices=["cuda:0,memory=512MiB"]) as pool, shoal.connect(pool.url):
            there = []
            for value in range(6):
                host = torch.full((1 << 20,), float(value)).pin_memory()
                there.append(host.to("shoal", non_blocking=True))
                del host
            back = [torch.empty(1 << 20).pin_memory() for _ in there]
            for out, value in zip(back, there):
                out.copy_(value, non_blocking=True)
            del value, there  # their memory waits for the copies
            other = torch.full((1 << 20,), 9.0, device="shoal")
            torch.shoal.synchronize()
            print([out.unique().tolist() for out in back], other[0].item())
    """
    found = programs.succeed(source, **slow_copies).strip()
    assert found == "[[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]] 9.0"
