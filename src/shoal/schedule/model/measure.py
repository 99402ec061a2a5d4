"""Measures any torch device, and a task on it.

This is the shell around `profiles`: it runs things and reads a clock.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shoal.schedule.model.device_profile import DeviceProfile, identity_of
from shoal.schedule.model.predictor import Operators, TaskProfile

#: A measurement is repeated until this much time is spent on it; the fastest repeat counts.
MEASURE_S = 0.15
REPEATS_MIN = 3
#: Each a little over three times the work of the one before, so that none takes much too long.
MATRIX_SIZES = (
    64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
COPY_BYTES = 32 * 2**20
#: What a measurement may allocate on the device.
SCRATCH_BYTES = 256 * 2**20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Clock = Callable[[], float]


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "synchronize"):
        module.synchronize(device)


@dataclass(frozen=True)
class Effort:
    """How a figure is measured.

    `average`: over all repeats instead of the fastest. Right for a device of declared speed, which pays
    its pauses late: only their sum is true.
    """

    measure_s: float = MEASURE_S
    average: bool = False

    @property
    def run_s(self) -> float:
        """A run takes at least this long: to be measured well, or for several pauses to fall into it.

        Short ones find a moment in which nobody else uses the machine.
        """
        return self.measure_s / (4 if self.average else 16)


def fastest_s(
    run: Callable[[], object],
    device: torch.device,
    clock: Clock,
    effort: Effort = Effort(),
    repeats_min: int = REPEATS_MIN,
) -> float:
    """Seconds of the fastest of several runs, the first (which may compile) left out."""
    run()
    synchronize(device)
    spent_s, best_s, repeats = 0.0, math.inf, 0
    while spent_s < effort.measure_s or repeats < repeats_min:
        start_s = clock()
        run()
        synchronize(device)
        took_s = clock() - start_s
        spent_s, best_s, repeats = spent_s + took_s, min(best_s, took_s), repeats + 1
    return spent_s / repeats if effort.average else best_s


def hardware_identity(device: torch.device) -> str:
    """Equal for devices that can be expected to be equally fast."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not hasattr(module, "get_device_properties"):
        hardware = platform.processor() or platform.machine()
    else:
        hardware = str(module.get_device_properties(device))
    return identity_of(hardware, device.type, torch.get_num_threads(), 1.0, str(torch.__version__))


def memory_of(device: torch.device) -> int:
    """Return the bytes of the device's memory; 0 if unknown."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not hasattr(module, "get_device_properties"):
        return 0
    return int(getattr(module.get_device_properties(device), "total_memory", 0))


def measure_device(
    device: torch.device | str,
    kind: str,
    dtypes: Iterable[torch.dtype] = DTYPES,
    memory_bytes: int | None = None,
    clock: Clock = time.perf_counter,
    *,
    effort: Effort = Effort(),
    scratch_bytes: int = SCRATCH_BYTES,
) -> DeviceProfile:
    """Run the micro-benchmarks. They take some `measure_s` for each dtype and for four more.

    >>> measure_device("cpu", "laptop").flops_per_s["float32"] > 0  # doctest: +SKIP
    True
    """
    device = torch.device(device)
    one = torch.ones(1, device=device)
    flops = {
        str(dtype).removeprefix("torch."): _matmul_flops(
            device, dtype, clock, effort, scratch_bytes
        )
        for dtype in dtypes
    }
    copy_bytes = min(COPY_BYTES, 3 * scratch_bytes // 8)  # Two of them fit.
    calls_s = fastest_s(lambda: [one.add_(1) for _ in range(100)], device, clock, effort)
    return DeviceProfile(
        kind=kind,
        identity=hardware_identity(device),
        memory_bytes=memory_of(device) if memory_bytes is None else memory_bytes,
        flops_per_s={name: speed for name, speed in flops.items() if speed > 0},
        # A copy reads and writes.
        bytes_per_s=2 * measure_link(device, device, clock, effort, copy_bytes),
        call_s=calls_s / 100,
        links={"host": measure_link("cpu", device, clock, effort, copy_bytes)},
        to_host_bytes_per_s=measure_link(device, "cpu", clock, effort, copy_bytes),
    )


def measure_link(
    source: torch.device | str,
    target: torch.device | str,
    clock: Clock = time.perf_counter,
    effort: Effort = Effort(),
    copy_bytes: int = COPY_BYTES,
) -> float:
    """Bytes/s of a large copy from one device to the other."""
    source, target = torch.device(source), torch.device(target)
    from_here = torch.zeros(copy_bytes, dtype=torch.uint8, device=source)
    to_there = torch.zeros(copy_bytes, dtype=torch.uint8, device=target)
    return copy_bytes / _sustained_s(lambda: to_there.copy_(from_here), target, clock, effort)


def _sustained_s(
    run: Callable[[], object], device: torch.device, clock: Clock, effort: Effort
) -> float:
    """Seconds of one of several runs in a row, so that waiting for their end weighs little."""
    once_s = max(_once_s(run, device, clock), 1e-6)
    times = min(64, math.ceil(effort.run_s / once_s))
    rounds_s = fastest_s(
        lambda: [run() for _ in range(times)], device, clock, effort, repeats_min=2
    )
    return rounds_s / times


def _matmul_flops(
    device: torch.device, dtype: torch.dtype, clock: Clock, effort: Effort, scratch_bytes: int
) -> float:
    """Of the first size that takes long enough to be measured well; 0: not supported.

    Shorter runs do not count: a device of declared speed pays its pauses in lumps. Where there are no
    pauses, the next size must not be faster either: a busy machine makes small ones look slow.
    """
    found = short = 0.0
    for size in MATRIX_SIZES:
        if 2 * size * size * dtype.itemsize > scratch_bytes:
            break
        try:
            a = torch.ones(size, size, dtype=dtype, device=device)
            run = functools.partial(torch.matmul, a, a)
            took_s = min(_once_s(run, device, clock), _once_s(run, device, clock))
            if took_s <= effort.run_s:
                short = 2 * size**3 / took_s  # What there is, if none of them takes long.
                continue
            rate = 2 * size**3 / fastest_s(run, device, clock, effort, repeats_min=2)
        except (RuntimeError, NotImplementedError):
            break
        if effort.average or (found > 0 and rate < 1.1 * found):
            return max(found, rate)
        found = max(found, rate)
    return found or short


def _once_s(run: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds of a second run."""
    run()
    synchronize(device)
    start_s = clock()
    run()
    synchronize(device)
    return clock() - start_s


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls, FLOPs and bytes of the operators that run under it, by name and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[tuple[str, str], list[float]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        flops = 0.0
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if not tensors or func.is_view:
            return out
        moved = sum(t.numel() * t.element_size() for t in tensors)
        key = (str(packet), str(tensors[0].dtype).removeprefix("torch."))
        entry = self.counts.setdefault(key, [0.0, 0.0, 0.0])
        for place, value in enumerate((1.0, flops, float(moved))):
            entry[place] += value
        return out

    def operators(self) -> list[Operators]:
        return [
            Operators(name, dtype, int(calls), flops, moved)
            for (name, dtype), (calls, flops, moved) in sorted(self.counts.items())
        ]


def measure_task(
    type_name: str,
    step: Callable[[], object],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: int,
    device: DeviceProfile,
    place: torch.device | str = "cpu",
    activation_bytes: int = 0,
    clock: Clock = time.perf_counter,
) -> TaskProfile:
    """Profile a task by running a few of its steps on one device."""
    step()  # Optimizers make their state in the first step.
    counter = OperatorCounter()
    with counter:
        step()
    took_s = fastest_s(step, torch.device(place), clock)
    weights = [*module.parameters(), *module.buffers()]
    state = [] if optimizer is None else tree_leaves(dict(optimizer.state))
    return TaskProfile(
        type=type_name,
        batch=batch,
        weights_bytes=_bytes(weights),
        optimizer_bytes=_bytes(t for t in state if isinstance(t, torch.Tensor)),
        activation_bytes=activation_bytes,
        operators=counter.operators(),
        steps_per_s={device.kind: 1 / took_s},
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
