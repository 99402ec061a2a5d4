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
    "share",
    "hand_over",
)
SHARED_MAX = 2  # at once: shared tensors are never swapped out, and the devices are small


class Program:
    """The same steps on both sides; `pairs` are (device's, local)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.shared: dict[int, shoal.Handle] = {}  # by address

    def step(self, name: str, first: int, second: int, number: int) -> None:
        if name == "new" or not self.pairs:
            local = torch.full((ROWS, 1024), float(number))
            place = "shoal" if number % 3 else f"shoal:{1 + number % 2}"
            self.pairs.append((local.to(place), local))
            return
        at, other = first % len(self.pairs), second % len(self.pairs)
        if name == "free":
            self.unshare(self.pairs.pop(at)[0])
        elif name == "share":
            self.share(self.pairs[at][0])
        elif name == "hand_over":
            self.hand_over(*self.pairs[at], number)
        elif name == "move":
            there, local = self.pairs[at]
            moved = there.to(f"shoal:{number % 4}")
            self.pairs[at] = (moved, local)
            if moved is not there:
                self.unshare(there)
        elif name == "random":
            seed = number
            for tensor in self.pairs[at]:
                torch.manual_seed(seed)
                tensor.uniform_()
        else:
            x, y = self.pairs[at], self.pairs[other]
            near = (y[0].to(x[0].device), y[1])
            done = [self.apply(name, a, b, number) for a, b in zip(x, near, strict=True)]
            if done[0] is not None:
                self.pairs.append((done[0], done[1]))

    def share(self, tensor: torch.Tensor) -> None:
        """Shares it, or takes it back."""
        if tensor.data_ptr() in self.shared:
            self.unshare(tensor)
        elif len(self.shared) < SHARED_MAX:
            self.shared[tensor.data_ptr()] = shoal.share(tensor, mode="exclusive")

    def unshare(self, tensor: torch.Tensor) -> None:
        handle = self.shared.pop(tensor.data_ptr(), None)
        if handle is not None:
            shoal.unshare(handle)

    def hand_over(self, there: torch.Tensor, local: torch.Tensor, number: int) -> None:
        """Somebody else who has it open writes to it."""
        handle = self.shared.get(there.data_ptr())
        if handle is None:
            return
        opened = shoal.open(handle)
        shoal.release(there)
        with shoal.acquire(opened):
            opened.add_(number)
        local.add_(number)
        shoal.acquire(there)

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
        program.unshare(there)
        same_bits(there, local)
    assert shoal.shares() == []
