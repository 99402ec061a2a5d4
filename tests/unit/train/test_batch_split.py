"""Division of a batch: nothing better by moving a sample, and it follows the devices."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.group.batch_split import CostFit, Divider, chunk_sizes, divide, weights

fits = st.lists(
    st.builds(
        CostFit,
        fixed_s=st.floats(0, 5),
        sample_s=st.floats(0.01, 5),
        known=st.just(True),
    ),
    min_size=1,
    max_size=5,
)


@given(st.integers(0, 200), fits, st.data())
def test_no_moved_sample_is_better(total: int, made: list[CostFit], data: st.DataObject) -> None:
    caps = [data.draw(st.none() | st.integers(total // len(made) + 1, total + 1)) for _ in made]
    counts = divide(total, made, caps)
    assert sum(counts) == total
    times = [fit.predict(n) for fit, n in zip(made, counts, strict=True)]
    for i, n in enumerate(counts):
        assert 0 <= n <= (caps[i] if caps[i] is not None else total)
    slowest = max(range(len(made)), key=lambda i: times[i])
    for j, n in enumerate(counts):
        if j != slowest and n < (caps[j] if caps[j] is not None else total):
            assert made[j].predict(n + 1) >= times[slowest] * (1 - 1e-9)


@given(st.floats(0.0, 0.1), st.floats(0.001, 0.1), st.lists(st.integers(10, 100), max_size=9))
def test_a_straight_line_is_found(fixed: float, sample: float, counts: list[int]) -> None:
    fit = CostFit()
    for n in [10, 100, *counts, 10, 100]:
        fit.observe(n, fixed + sample * n)
    for n in (10, 50, 100):
        assert fit.predict(n) == pytest.approx(fixed + sample * n, rel=0.25)


def run(divider: Divider, speeds: list[float], total: int, steps: int, noise: float = 0.0) -> float:
    """The last step's time on devices that need 1 ms + 2 ms a sample at speed 1."""
    rng = random.Random(4)
    slowest = 0.0
    for _ in range(steps):
        counts = divider.split(total)
        times = [
            (0.001 + 0.002 * n) / s * (1 + rng.uniform(-noise, noise)) if n else 0.0
            for n, s in zip(counts, speeds, strict=True)
        ]
        divider.observe(counts, times)
        slowest = max(times)
    return slowest


def test_unequal_devices_share_by_speed() -> None:
    divider = Divider(2)
    alone = 0.001 + 0.002 * 64
    assert run(divider, [1.0, 0.45], 64, 6) < alone / 1.45 * 1.06
    assert divider.split(64)[0] > divider.split(64)[1] * 2


def test_a_device_that_slows_down_gets_less_within_five_steps() -> None:
    divider = Divider(2)
    run(divider, [1.0, 1.0], 64, 10, noise=0.05)
    assert abs(divider.split(64)[0] - 32) <= 2
    after = run(divider, [1.0, 0.5], 64, 5, noise=0.02)  # the fifth step is the one that counts
    best = (0.001 + 0.002 * 64) / 1.5
    assert after < best / 0.9
    # And back again.
    assert run(divider, [1.0, 1.0], 64, 6, noise=0.02) < (0.001 + 0.002 * 64) / 2 / 0.9


def test_noise_does_not_move_the_division() -> None:
    divider = Divider(2)
    run(divider, [1.0, 1.0], 64, 8, noise=0.02)
    seen = set()
    for _ in range(30):
        counts = divider.split(64)
        seen.add(counts)
        divider.observe(counts, [0.065, 0.066])
    assert len(seen) <= 3


def test_stalls_of_a_busy_machine_do_not_move_the_division() -> None:
    divider = Divider(2)
    rng = random.Random(7)
    seen = []
    for _ in range(60):
        counts = divider.split(64)
        seen.append(counts)
        stalled = [1 + (rng.uniform(0.0, 0.15) if rng.random() < 0.5 else 0.0) for _ in counts]
        divider.observe(counts, [0.002 * n * s for n, s in zip(counts, stalled, strict=True)])
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 2
    assert abs(seen[-1][0] - 32) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_stalls_all_groups_moves_nothing(seed: int) -> None:
    divider, rng = Divider(2), random.Random(seed)
    seen = []
    for _ in range(100):
        counts = divider.split(64)
        seen.append(counts)
        stall = 1 + (rng.random() if rng.random() < 0.3 else 0.0)
        divider.observe(counts, [0.002 * n * stall * rng.uniform(0.9, 1.1) for n in counts])
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 2
    assert abs(seen[-1][0] - 32) <= 4


def test_sizes_come_again() -> None:
    divider, rng = Divider(2), random.Random(3)
    sizes = set()
    for _ in range(200):
        counts = divider.split(256)
        sizes |= set(counts)
        speed = rng.uniform(0.5, 1.0)
        for _ in range(4):
            divider.observe(counts, (0.001 * counts[0], 0.001 * counts[1] / speed))
    assert sum(size % 8 != 0 for size in sizes) == 0


def test_a_useless_device_gets_nothing_but_is_tried_again() -> None:
    divider = Divider(2, probe_every=5)
    divider.fits = [CostFit(0.0, 0.001, True), CostFit(10.0, 0.001, True)]
    given_out = [divider.split(16) for _ in range(5)]
    assert given_out[:4] == [(16, 0)] * 4
    assert given_out[4] == (15, 1)


def test_stalls_are_borne_and_a_slower_device_loses_at_most_half_at_once() -> None:
    divider = Divider(2)
    for _ in range(3):
        divider.observe(divider.split(64), (0.1, 0.1))
    divider.observe((32, 32), (0.1, 50.0))
    assert divider.split(64) == (32, 32)  # once is a stall
    divider.observe((32, 32), (0.1, 50.0))
    assert divider.split(64) == (48, 16)


def test_a_least_share_is_kept_in_the_first_step() -> None:
    assert Divider(2, least=2, speeds=(1.0, 0.05)).split(8) == (6, 2)
    assert Divider(2, speeds=(1.0, 0.5)).split(30) == (20, 10)


def test_a_least_share_is_kept() -> None:
    divider = Divider(3, least=2)
    divider.fits = [CostFit(0.0, 0.001, True), CostFit(9.0, 9.0, True), CostFit(9.0, 9.0, True)]
    assert divider.split(32) == (28, 2, 2)
    assert divider.split(4) == (2, 1, 1)


def test_the_first_step_with_a_size_does_not_count() -> None:
    divider = Divider(2)
    divider.observe(divider.split(64), (0.1, 5.0))
    assert divider.split(64) == (32, 32)


def test_limits_and_lost_groups() -> None:
    divider = Divider(3, limits=(4, 20, 20))
    assert divider.split(30)[0] <= 4
    left = divider.without(0)
    assert left.split(30) == (15, 15)
    assert left.limits == (20, 20)
    with pytest.raises(ValueError, match="hold 40 samples"):
        left.split(50)


@given(st.integers(0, 100), st.integers(1, 20))
def test_chunks_and_weights(samples: int, parts: int) -> None:
    sizes = chunk_sizes(samples, parts)
    assert sum(sizes) == samples
    assert all(size > 0 for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    if samples:
        assert sum(weights(sizes)) == pytest.approx(1)


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="without samples"):
        weights([0, 0])
