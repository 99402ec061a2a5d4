"""Random programs on three small devices do what they do on local torch, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from tests.support.compare import same_bits

MiB = 2**20
ROWS = 64


@pytest.fixture(scope="module")
def lease() -> Iterator[shoal.Lease]:
    """Three devices that hold about twelve of the programs' tensors together, and swap the rest."""
    devices = ["cpu,memory=2MiB,host=4MiB,disk=16MiB,threads=1"] * 3
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=3) as made:
        yield made


#: What a step may do.
OPERATIONS = (
    "new",
    "windows",
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
MAKERS = ("new", "windows", "clone", "mul", "matmul")
TENSORS_MAX = 32
SHARED_MAX = 2  # at once: shared tensors are never swapped out, and the devices are small


class Program:
    """The same steps on both sides; `pairs` are (device's, local)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: By address: the handle, and the local tensor that has the layout of the shared one.
        self.shared: dict[int, tuple[shoal.Handle, torch.Tensor]] = {}

    def step(self, name: str, first: int, second: int, number: int) -> None:
        if name in ("new", "windows") or not self.pairs:
            self.make(number, rows=ROWS if name == "new" else 2 * ROWS)
            return
        at, other = first % len(self.pairs), second % len(self.pairs)
        if name == "free":
            self.unshare(self.pairs.pop(at)[0])
        elif name == "share":
            self.share(*self.pairs[at])
        elif name == "hand_over":
            self.hand_over(self.pairs[at][0], number)
        elif name == "move":
            there, local = self.pairs[at]
            moved = there.to(f"shoal:{number % 4}")
            if moved is not there:
                self.pairs[at] = (moved, local.clone())  # other views stay with the old one
                self.unshare(there)
        elif name == "random":
            seed = number
            for tensor in self.pairs[at]:
                torch.manual_seed(seed)
                tensor.uniform_()
        else:
            x, y = self.pairs[at], self.pairs[other]
            near = (y[0].to(x[0].device), y[1])
            if (
                x[1].untyped_storage().data_ptr() == y[1].untyped_storage().data_ptr()
                and at != other
            ):
                near = (
                    near[0].clone(),
                    y[1].clone(),
                )  # torch refuses operands that overlap in part
            done = [self.apply(name, a, b, number) for a, b in zip(x, near, strict=True)]
            if done[0] is not None:
                self.pairs.append((done[0], done[1]))

    def make(self, number: int, rows: int) -> None:
        """A tensor; of a larger one two windows that overlap, so that writes are seen in both."""
        local = torch.full((rows, 1024), float(number))
        there = local.to("shoal" if number % 3 else f"shoal:{1 + number % 2}")
        starts = (0, ROWS // 2) if rows > ROWS else (0,)
        self.pairs += [(there[i : i + ROWS], local[i : i + ROWS]) for i in starts]

    def share(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Shares it, or takes it back."""
        address = tensor.untyped_storage().data_ptr()
        if address in self.shared:
            self.unshare(tensor)
        elif len(self.shared) < SHARED_MAX:
            self.shared[address] = (shoal.share(tensor, mode="exclusive"), local)

    def unshare(self, tensor: torch.Tensor) -> None:
        shared = self.shared.pop(tensor.untyped_storage().data_ptr(), None)
        if shared is not None:
            shoal.unshare(shared[0])

    def hand_over(self, there: torch.Tensor, number: int) -> None:
        """Somebody else who has it open writes to it."""
        shared = self.shared.get(there.untyped_storage().data_ptr())
        if shared is None:
            return
        handle, local = shared
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


STEPS = st.tuples(
    st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(0, 30), st.integers(0, 90)
)
QUIET = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def run(filled: int, steps: list[tuple[str, int, int, int]], often: int) -> None:
    """Both sides are compared, and the page table is checked, after every `often` steps.

    It begins with as many tensors as `filled` says. Three devices hold 24.
    """
    before = shoal.memory.counters()
    program = Program()
    for number in range(filled):
        program.make(number, ROWS)
    for number, step in enumerate(steps):
        if len(program.pairs) >= TENSORS_MAX and step[0] in MAKERS:
            continue
        program.step(*step)
        if number % often == 0:
            shoal.memory.check()
            for pair in program.pairs:
                same_bits(*pair)
    for there, local in program.pairs:
        same_bits(there, local)
        program.unshare(there)
        same_bits(there, local)
    shoal.memory.check()
    assert shoal.shares() == []
    moved = shoal.memory.counters() - before
    assert filled < 26 or moved.dropped_bytes + moved.swapped_bytes > 0, "something was evicted"


@settings(QUIET, max_examples=40)
@given(filled=st.integers(0, 28), steps=st.lists(STEPS, min_size=5, max_size=40))
def test_any_program_equals_local_torch_after_every_step(
    lease: shoal.Lease, filled: int, steps: list[tuple[str, int, int, int]]
) -> None:
    run(filled, steps, often=1)


@settings(QUIET, max_examples=40)
@given(
    filled=st.integers(0, 28),
    steps=st.lists(STEPS, min_size=20, max_size=80),
    often=st.integers(5, 30),
)
def test_any_program_equals_local_torch_with_many_steps_under_way(
    lease: shoal.Lease, filled: int, steps: list[tuple[str, int, int, int]], often: int
) -> None:
    """Between two looks the devices are behind: copies ahead of use, and what they displace."""
    run(filled, steps, often)


def test_the_check_compares_replicas(lease: shoal.Lease) -> None:
    weight = torch.ones(1, 1024, device="shoal")
    blocks = [torch.ones(200, 1024, device="shoal") for _ in range(5)]  # more than one device holds
    for block in blocks:
        block.add_(weight)
    copies = shoal.memory.check()
    found = {s.address: s for s in shoal.memory.map()}
    assert len({found[b.data_ptr()].home for b in blocks}) > 1
    assert found[weight.data_ptr()].state == "replicated"
    assert copies >= len(found[weight.data_ptr()].copies) + 1
