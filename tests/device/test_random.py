"""Random numbers: the same bits as local CPU, wherever local CPU repeats itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compare import close, same_bits

Draw = Callable[[str, torch.Generator | None], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "rand": lambda d, g: torch.rand(37, device=d, generator=g),
    "randn": lambda d, g: torch.randn(37, device=d, generator=g),
    "randn double": lambda d, g: torch.randn(37, device=d, generator=g, dtype=torch.float64),
    "randn complex": lambda d, g: torch.randn(9, device=d, generator=g, dtype=torch.complex64),
    "randint": lambda d, g: torch.randint(0, 1000, (37,), device=d, generator=g),
    "randperm": lambda d, g: torch.randperm(37, device=d, generator=g),
    "normal_": lambda d, g: torch.empty(50, device=d).normal_(1, 2, generator=g),
    "uniform_": lambda d, g: torch.empty(50, device=d).uniform_(-1, 1, generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((50,), 0.3, device=d), generator=g),
    "exponential_": lambda d, g: torch.empty(50, device=d).exponential_(generator=g),
    "geometric_": lambda d, g: torch.empty(50, device=d).geometric_(0.4, generator=g),
    "cauchy_": lambda d, g: torch.empty(50, device=d).cauchy_(generator=g),
    "log_normal_": lambda d, g: torch.empty(50, device=d).log_normal_(generator=g),
    "random_": lambda d, g: torch.empty(50, device=d, dtype=torch.int64).random_(generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(9, device=d), 5, generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((9,), 3.0, device=d), generator=g),
    "normal of tensors": lambda d, g: torch.normal(
        torch.zeros(9, device=d), torch.ones(9, device=d), generator=g
    ),
    "trunc_normal_": lambda d, g: torch.nn.init.trunc_normal_(
        torch.empty(50, device=d), generator=g
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_manual_seed_gives_the_bits_of_local_cpu(name: str) -> None:
    torch.manual_seed(123)
    expected = [DRAWS[name]("cpu", None) for _ in range(3)]
    torch.manual_seed(123)
    actual = [DRAWS[name]("shoal", None) for _ in range(3)]
    for a, b in zip(actual, expected, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_is_honoured(name: str) -> None:
    local = torch.Generator().manual_seed(5)
    remote = torch.Generator("shoal").manual_seed(5)
    torch.shoal.manual_seed(99)  # the default generator must not matter
    for _ in range(2):
        same_bits(DRAWS[name]("shoal", remote), DRAWS[name]("cpu", local))


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1), st.integers(1, 200))
def test_any_seed_and_length(seed: int, count: int) -> None:
    torch.manual_seed(seed)
    expected = torch.randn(count)
    torch.manual_seed(seed)
    same_bits(torch.randn(count, device="shoal"), expected)


def test_dropout_drops_the_same_elements() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, 0.3)
    torch.manual_seed(3)
    same_bits(torch.nn.functional.dropout(x.to("shoal"), 0.3), expected)


def test_state_can_be_kept_and_brought_back() -> None:
    torch.shoal.manual_seed(1)
    torch.randn(5, device="shoal")
    state = torch.shoal.get_rng_state()
    first = torch.randn(9, device="shoal")
    assert not torch.equal(first, torch.randn(9, device="shoal"))
    torch.shoal.set_rng_state(state)
    same_bits(torch.randn(9, device="shoal"), first)


def test_state_is_that_of_a_local_generator() -> None:
    local = torch.Generator().manual_seed(42)
    torch.rand(11, generator=local)
    remote = torch.Generator("shoal")
    remote.set_state(local.get_state())
    assert torch.equal(remote.get_state(), local.get_state())
    same_bits(torch.rand(4, device="shoal", generator=remote), torch.rand(4, generator=local))


def test_generators_are_independent() -> None:
    one, two = (torch.Generator("shoal").manual_seed(7) for _ in range(2))
    first = torch.rand(4, device="shoal", generator=one)
    torch.rand(4, device="shoal", generator=one)
    same_bits(torch.rand(4, device="shoal", generator=two), first)
    assert one.initial_seed() == two.initial_seed() == 7
    assert one.device.type == "shoal"


def test_a_cloned_generator_goes_on_from_the_same_place() -> None:
    one = torch.Generator("shoal").manual_seed(7)
    torch.rand(4, device="shoal", generator=one)
    two = one.clone_state()
    same_bits(
        torch.rand(4, device="shoal", generator=one), torch.rand(4, device="shoal", generator=two)
    )


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="shoal", generator=torch.Generator())


def test_fork_rng_brings_the_state_back() -> None:
    torch.shoal.manual_seed(5)
    expected = torch.rand(3, device="shoal")
    torch.shoal.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type="shoal"):
        torch.rand(100, device="shoal")
    same_bits(torch.rand(3, device="shoal"), expected)


def test_seeding_is_part_of_the_program_order() -> None:
    torch.manual_seed(1)
    a = torch.rand(3, device="shoal")
    torch.manual_seed(1)
    b = torch.rand(3, device="shoal")
    c = torch.rand(3, device="shoal")
    same_bits(a, b)
    assert not torch.equal(b, c)


def test_initialisation_of_a_module_on_the_device_is_that_of_a_local_one() -> None:
    torch.manual_seed(11)
    local = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Conv1d(3, 4, 2))
    torch.manual_seed(11)
    with torch.device("shoal"):
        remote = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Conv1d(3, 4, 2))
    for a, b in zip(remote.parameters(), local.parameters(), strict=True):
        assert a.device.type == "shoal"
        same_bits(a, b)


def test_unseeded_programs_differ() -> None:
    torch.shoal.seed()
    first = torch.rand(8, device="shoal")
    torch.shoal.seed()
    assert not torch.equal(first, torch.rand(8, device="shoal"))
    close(first, first)
