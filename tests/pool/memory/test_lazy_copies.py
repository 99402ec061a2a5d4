"""Copies between devices that are made when their target is used, or before their source changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import _core
from tests.support.compare import same_bits

DEVICES = [f"cpu,memory=64MiB,threads=1,name={name}" for name in ("left", "right", "third")]
MEMBERS = ("shoal:1", "shoal:2", "shoal:3")
COUNT = 3000


@pytest.fixture(scope="module", autouse=True)
def _lease() -> Iterator[None]:
    with shoal.up(DEVICES) as pool, shoal.connect(pool.url, devices=3):
        yield


def bytes_moved() -> int:
    return torch.shoal.traffic()["bytes_peer"]


def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A target, a source whose copy is owed to it, and what it holds."""
    value = torch.randn(COUNT)
    target, source = torch.zeros(COUNT).to("shoal:1"), value.to("shoal:2")
    torch.shoal.synchronize()
    assert _core.copy_later(target, source)
    return target, source, value


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "read": lambda t: t.cpu(),
    "read of a part": lambda t: t[10:20].cpu(),
    "read of one": lambda t: torch.tensor(t[7].item()),
    "operator": lambda t: t * 2,
    "view": lambda t: t.view(30, 100).t() + 1,
    "in place": lambda t: t.add_(1),
    "part in place": lambda t: (t[5:9].zero_(), t)[1],
    "copied on": lambda t: t.to("shoal:3"),
    "pinned": lambda t: torch.empty(COUNT, pin_memory=t.device.type == "shoal").copy_(t),
    "part from the host": lambda t: (t[5:9].copy_(torch.ones(4)), t)[1],
    "all from the host": lambda t: t.copy_(torch.arange(float(COUNT))),
    "added to": lambda t: (t.add_(torch.ones(COUNT).to(t.device)), t)[1],
    "stored": lambda t: torch.stack([t, t]),
}


@pytest.mark.parametrize("name", USES)
def test_the_first_use_finds_the_bytes(name: str) -> None:
    target, _, value = pair()
    moved = bytes_moved()
    found = USES[name](target)
    same_bits(found, USES[name](value.clone()))
    if name != "all from the host":  # of which nothing is left
        assert bytes_moved() == moved + (2 if name == "copied on" else 1) * value.nbytes


def test_nothing_moves_before_it_is_used() -> None:
    moved = bytes_moved()
    target, _source, value = pair()
    torch.shoal.synchronize()
    assert bytes_moved() == moved
    same_bits(target, value)
    assert bytes_moved() == moved + value.nbytes


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda s: s.zero_(),
    "a part": lambda s: s[3:5].fill_(9),
    "from the host": lambda s: s.copy_(torch.zeros(COUNT)),
    "a little from the host": lambda s: s[:2].copy_(torch.zeros(2)),
    "from another device": lambda s: s.copy_(torch.zeros(COUNT).to("shoal:3")),
    "added": lambda s: _core.add_from(s, torch.ones(COUNT).to("shoal:3")),
    "resized": lambda s: s.resize_(10 * COUNT),
    "by a list of parts": lambda s: torch._foreach_mul_([s, s[:7]], 2.0),
    "owed anew": lambda s: _core.copy_later(s, torch.zeros(COUNT).to("shoal:3")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_bytes_are_those_of_the_copy(name: str) -> None:
    target, source, value = pair()
    CHANGES[name](source)
    same_bits(target, value)


def test_a_source_may_go() -> None:
    target, source, value = pair()
    del source
    junk = [torch.full((COUNT,), 7.0, device="shoal:2") for _ in range(4)]
    same_bits(target, value)
    del junk


def test_a_target_may_go_unused() -> None:
    live = torch.shoal.memory_allocated(0)
    moved = bytes_moved()
    target, source, value = pair()
    del target
    source.add_(1)
    same_bits(source, value + 1)
    assert bytes_moved() == moved
    del source
    assert torch.shoal.memory_allocated(0) == live


def test_a_later_copy_takes_the_place_of_an_earlier_one() -> None:
    target, _source, _ = pair()
    moved = bytes_moved()
    other = torch.randn(COUNT)
    assert _core.copy_later(target, other.to("shoal:3"))
    same_bits(target, other)
    assert bytes_moved() == moved + other.nbytes


def test_a_chain_and_a_circle() -> None:
    a, b, c = (torch.full((COUNT,), float(i)).to(f"shoal:{i}") for i in (1, 2, 3))
    assert _core.copy_later(b, a)
    assert _core.copy_later(c, b)  # of what b will hold
    assert _core.copy_later(a, c)
    a.add_(1)
    same_bits(c, torch.full((COUNT,), 1.0))
    same_bits(b, torch.full((COUNT,), 1.0))
    same_bits(a, torch.full((COUNT,), 2.0))


def test_what_cannot_be_put_off() -> None:
    target, source = torch.zeros(4, 6, device="shoal:1"), torch.ones(4, 6, device="shoal:2")
    assert not _core.copy_later(target, target)
    assert not _core.copy_later(target, torch.ones(4, 6, device="shoal:1"))
    assert not _core.copy_later(target[:2], source[:2])
    assert not _core.copy_later(target, source.t().contiguous().t())
    assert not _core.copy_later(target, source.double())
    assert not _core.copy_later(target, torch.ones(4, 6))
    assert not _core.copy_later(target, torch.ones(4, 6, device="shoal"))  # the whole lease's
    same_bits(target, torch.zeros(4, 6))


def test_autograd_sees_the_change() -> None:
    weight = torch.ones(3, device="shoal:1", requires_grad=True)
    product = (weight * weight).sum()
    with torch.no_grad():
        assert _core.copy_later(weight, torch.zeros(3, device="shoal:2"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


STEP = st.tuples(
    st.sampled_from(["later", "now", "add", "write", "read", "new", "part"]),
    st.integers(0, 5),
    st.integers(0, 5),
)


@settings(max_examples=60)
@given(st.lists(STEP, max_size=40))
def test_programs_do_what_they_do_with_plain_copies(steps: list[tuple[str, int, int]]) -> None:
    """Six tensors on three devices, and the same in local memory."""

    def place(i: int) -> str:
        return MEMBERS[i % 3]

    local = [torch.full((64,), float(i)) for i in range(6)]
    ours = [t.to(place(i)) for i, t in enumerate(local)]
    for count, (step, i, j) in enumerate(steps):
        if step == "later":
            if place(i) != place(j):
                assert _core.copy_later(ours[i], ours[j])
                local[i] = local[j].clone()
        elif step == "now":
            ours[i].copy_(ours[j])
            local[i] = local[j].clone()
        elif step == "add":
            ours[i].add_(ours[j].to(place(i)))
            local[i] = local[i] + local[j]
        elif step == "write":
            ours[i].copy_(torch.full((64,), 100.0 + count))
            local[i] = torch.full((64,), 100.0 + count)
        elif step == "part":
            ours[i][3:9] = float(count)
            local[i] = local[i].clone()
            local[i][3:9] = float(count)
        elif step == "new":
            ours[i] = torch.full((64,), float(-count), device=place(i))
            local[i] = torch.full((64,), float(-count))
        else:
            same_bits(ours[i], local[i])
    for our, their in zip(ours, local, strict=True):
        same_bits(our, their)
