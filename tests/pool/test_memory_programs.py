"""Random programs on three small devices do what they do on local torch, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from shoal import _core
from tests.support.compare import same_bits

MiB = 2**20
ROWS = 64


@pytest.fixture(scope="module")
def lease() -> Iterator[shoal.Lease]:
    """Three devices that hold about twelve of the programs' tensors together, and swap the rest."""
    devices = ["cpu,memory=2MiB,host=4MiB,disk=16MiB,threads=1"] * 3
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=3) as made:
        yield made


def check_page_table() -> None:
    """One writer, copies only where there is memory, bytes conserved."""
    total = 0
    for _, size, bound, valid, _, home, _, _ in _core.segments():
        total += size
        assert valid & ~bound == 0
        assert (bound == 0) == (home < 0)
        assert home < 0 or valid >> home & 1, "the writer has the present bytes"
    assert total == _core.memory_use(0)["allocated_bytes"]


#: (name, needs another tensor, what to do with the place, the other place and a number).
OPERATIONS = (
    "new",
    "add_",
    "mul",
    "view_write",
    "clone",
    "matmul",
    "move",
    "free",
    "copy",
    "random",
)


class Program:
    """The same steps on both sides; `pairs` are (device's, local)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, name: str, first: int, second: int, number: int) -> None:
        if name == "new" or not self.pairs:
            local = torch.full((ROWS, 1024), float(number))
            place = "shoal" if number % 3 else f"shoal:{1 + number % 2}"
            self.pairs.append((local.to(place), local))
            return
        at, other = first % len(self.pairs), second % len(self.pairs)
        if name == "free":
            self.pairs.pop(at)
        elif name == "move":
            there, local = self.pairs[at]
            self.pairs[at] = (there.to(f"shoal:{number % 4}"), local)
        elif name == "random":
            seed = number
            for tensor in self.pairs[at]:
                torch.manual_seed(seed)
                tensor.uniform_()
        else:
            x, y = self.pairs[at], self.pairs[other]
            moved = (y[0].to(x[0].device), y[1])
            done = [self.apply(name, a, b, number) for a, b in zip(x, moved, strict=True)]
            if done[0] is not None:
                self.pairs.append((done[0], done[1]))

    @staticmethod
    def apply(name: str, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor | None:
        if name == "add_":
            x.add_(y, alpha=number)
        elif name == "mul":
            return x * (number / 7) - y
        elif name == "view_write":
            x[number % ROWS :, ::3].sub_(y[number % ROWS :, ::3])
        elif name == "clone":
            return x.clone()
        elif name == "copy":
            x[: number % ROWS].copy_(y[: number % ROWS])
        elif name == "matmul":
            small = (x[:, :ROWS] * 1e-3) @ (y[:, :ROWS] * 1e-3)
            return small.repeat(1, 16)
        return None


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(0, 30), st.integers(0, 90)
        ),
        min_size=5,
        max_size=60,
    ),
    often=st.integers(1, 8),
)
def test_any_program_equals_local_torch(
    lease: shoal.Lease, steps: list[tuple[str, int, int, int]], often: int
) -> None:
    program = Program()
    for number, step in enumerate(steps):
        if len(program.pairs) >= 40 and step[0] in ("new", "clone", "mul", "matmul"):
            continue
        program.step(*step)
        check_page_table()
        if number % often == 0 and program.pairs:
            same_bits(*program.pairs[number % len(program.pairs)])
    for there, local in program.pairs:
        same_bits(there, local)
