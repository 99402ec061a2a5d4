"""Profiles: the roofline, its correction, and measuring through torch."""

from __future__ import annotations

import pytest
import torch

from shoal.schedule.model.estimates import throughputs
from shoal.schedule.model.measure import Effort, OperatorCounter, measure_device, measure_task
from shoal.schedule.model.predictor import (
    ERROR_PRIOR,
    DeviceProfile,
    Operators,
    Predictor,
    TaskProfile,
    busy_shares,
    busy_times,
)

SLOW = DeviceProfile("slow", "s", 0, {"float32": 1e9}, 1e9, 0.0)
FAST = DeviceProfile("fast", "f", 0, {"float32": 4e9}, 2e9, 0.0)
COMPUTE = TaskProfile("mm", 8, 0, 0, 0, [Operators("mm", "float32", 1, 1e8, 1e6)])
MEMORY = TaskProfile("add", 8, 0, 0, 0, [Operators("add", "float32", 1, 1e6, 1e8)])


def test_compute_and_memory_bound_work_scale_differently() -> None:
    assert busy_times(COMPUTE, SLOW)[0] / busy_times(COMPUTE, FAST)[0] == pytest.approx(4)
    assert busy_times(MEMORY, SLOW)[0] / busy_times(MEMORY, FAST)[0] == pytest.approx(2)
    assert busy_shares(COMPUTE, SLOW) == pytest.approx((1.0, 0.01))


def test_one_observation_corrects_the_other_device_and_errors_are_kept() -> None:
    predictor = Predictor([SLOW, FAST])
    assert predictor.predict(COMPUTE, FAST).steps_per_s == pytest.approx(40)
    assert predictor.predict(COMPUTE, FAST).error == ERROR_PRIOR
    predictor.observe(COMPUTE, SLOW, 5.0)  # Half of the roofline's 10.
    assert predictor.predict(COMPUTE, FAST).steps_per_s == pytest.approx(20)
    predictor.observe(COMPUTE, FAST, 25.0)
    assert predictor.error() == pytest.approx(0.2)
    assert predictor.predict(COMPUTE, FAST).observed
    assert predictor.predict(COMPUTE, FAST).steps_per_s == pytest.approx(25)


def test_later_observations_are_averaged_in() -> None:
    predictor = Predictor([SLOW])
    for speed in (10.0, 20.0):
        predictor.observe(COMPUTE, SLOW, speed)
    assert 10.0 < predictor.predict(COMPUTE, SLOW).steps_per_s < 20.0


def test_operators_are_counted_exactly() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with OperatorCounter() as counter:
        (a @ b).add_(1).view(-1)
    found = {entry.name: entry for entry in counter.operators()}
    assert set(found) == {"aten.mm", "aten.add_"}
    assert found["aten.mm"].flops == 2 * 4 * 8 * 16
    assert found["aten.mm"].bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)


def test_a_task_is_profiled_by_running_it() -> None:
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ticks = iter(range(1_000_000))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    profile = measure_task(
        "linear", step, model, optimizer, 2, SLOW, clock=lambda: float(next(ticks))
    )
    assert profile.weights_bytes == profile.optimizer_bytes == 4 * (16 * 4 + 4)
    assert profile.steps_per_s == {"slow": 1.0}  # The clock ticks once per reading.
    assert sum(entry.flops for entry in profile.operators) > 0


def test_profiles_become_the_table_that_policies_read() -> None:
    sized = TaskProfile("mm", 8, 100, 200, 300, COMPUTE.operators, {"slow": 5.0})
    table = throughputs([sized, MEMORY], [SLOW, FAST], Predictor([SLOW, FAST]))
    assert table.kinds == ("slow", "fast")
    assert table.alone[0].tolist() == pytest.approx([5.0, 20.0])
    assert table.memory_bytes[0].tolist() == [600.0, 600.0]
    # One wants the compute and the other the bandwidth: together they lose next to nothing.
    assert table.gain(0, (0, 1)) > 1.9
    assert table.gain(0, (0, 0)) == pytest.approx(1.0)


def test_a_real_device_is_measured() -> None:
    profile = measure_device("cpu", "here", dtypes=[torch.float32], memory_bytes=2**30)
    assert profile.memory_bytes == 2**30
    assert profile.flops_per_s["float32"] > 1e6
    assert profile.bytes_per_s > 1e6
    assert 0 < profile.call_s < 1
    assert profile.links["host"] > 1e6


def test_a_dtype_that_the_device_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.matmul

    def only_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float32:
            raise RuntimeError("not implemented for 'Half'")
        return real(a, b)

    monkeypatch.setattr(torch, "matmul", only_float32)
    profile = measure_device("cpu", "here", effort=Effort(0.001), scratch_bytes=2**20)
    assert list(profile.flops_per_s) == ["float32"]


def test_a_small_device_is_measured_within_its_memory() -> None:
    profile = measure_device("cpu", "here", effort=Effort(0.001, average=True), scratch_bytes=2**18)
    assert set(profile.flops_per_s) == {"float32", "bfloat16", "float16"}
    assert profile.bytes_per_s > 0
