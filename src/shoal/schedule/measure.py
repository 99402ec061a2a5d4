"""Measures a device and a task through torch, whatever the device is.

This is the shell around `profiles`: it runs things and reads a clock. A device's figures are cached
by hardware identity, so a node with eight equal devices measures one.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shoal.schedule.profiles import DeviceProfile, Operators, TaskProfile

#: A measurement is repeated until this much time is spent on it; the fastest repeat counts.
MEASURE_S = 0.15
REPEATS_MIN = 3
MATRIX_SIZES = (256, 512, 1024, 2048, 4096)
COPY_BYTES = 64 * 2**20

Clock = Callable[[], float]


def synchronize(device: torch.device) -> None:
    """Wait until all that was issued to the device is done."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "synchronize"):
        module.synchronize(device)


def fastest_s(run: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds of the fastest of several runs, the first (which may compile) left out."""
    run()
    synchronize(device)
    spent_s, best_s, repeats = 0.0, math.inf, 0
    while spent_s < MEASURE_S or repeats < REPEATS_MIN:
        start_s = clock()
        run()
        synchronize(device)
        took_s = clock() - start_s
        spent_s, best_s, repeats = spent_s + took_s, min(best_s, took_s), repeats + 1
    return best_s


def hardware_identity(device: torch.device) -> str:
    """Equal for devices that can be expected to be equally fast."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not hasattr(module, "get_device_properties"):
        cpu = platform.processor() or platform.machine()
        return f"{device.type} {cpu} threads={torch.get_num_threads()} torch={torch.__version__}"
    return f"{module.get_device_properties(device)} torch={torch.__version__}"


def memory_of(device: torch.device) -> int:
    """Bytes of the device's memory; 0 where it cannot be asked."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not hasattr(module, "get_device_properties"):
        return 0
    return int(getattr(module.get_device_properties(device), "total_memory", 0))


def measure_device(
    device: torch.device | str,
    kind: str,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    memory_bytes: int | None = None,
    clock: Clock = time.perf_counter,
) -> DeviceProfile:
    """Run the micro-benchmarks.

    >>> measure_device("cpu", "laptop").flops_per_s["float32"] > 0  # doctest: +SKIP
    True
    """
    device = torch.device(device)
    one = torch.ones(1, device=device)
    flops = {str(d).removeprefix("torch."): _matmul_flops(device, d, clock) for d in dtypes}
    return DeviceProfile(
        kind=kind,
        identity=hardware_identity(device),
        memory_bytes=memory_of(device) if memory_bytes is None else memory_bytes,
        flops_per_s={name: speed for name, speed in flops.items() if speed > 0},
        bytes_per_s=2 * measure_link(device, device, clock),  # A copy reads and writes.
        call_s=fastest_s(lambda: [one.add_(1) for _ in range(100)], device, clock) / 100,
        links={"host": measure_link("cpu", device, clock)},
    )


def measure_link(
    source: torch.device | str, target: torch.device | str, clock: Clock = time.perf_counter
) -> float:
    """Bytes/s of a large copy from one device to the other."""
    source, target = torch.device(source), torch.device(target)
    from_here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=source)
    to_there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=target)
    return COPY_BYTES / fastest_s(lambda: to_there.copy_(from_here), target, clock)


def _matmul_flops(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Best of growing sizes, until one takes long enough to be the last; 0: not supported."""
    best = 0.0
    for size in MATRIX_SIZES:
        try:
            a = torch.ones(size, size, dtype=dtype, device=device)
            took_s = fastest_s(lambda a=a: a @ a, device, clock)  # type: ignore[misc]
        except (RuntimeError, NotImplementedError):
            return best
        best = max(best, 2 * size**3 / took_s)
        if took_s > MEASURE_S / 2:
            break
    return best


def cached_profile(
    device: torch.device | str,
    kind: str,
    folder: Path,
    refresh: bool = False,
    measure: Callable[..., DeviceProfile] = measure_device,
) -> DeviceProfile:
    """The profile from the folder, measured if the hardware is not in it yet."""
    device = torch.device(device)
    identity = hardware_identity(device)
    path = folder / "devices.json"
    known: dict[str, DeviceProfile] = {}
    if path.exists():
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, DeviceProfile])
    if refresh or identity not in known:
        known[identity] = measure(device, kind)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(known))
    return msgspec.structs.replace(known[identity], kind=kind)


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
