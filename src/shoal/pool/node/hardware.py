"""What a device is and offers, and the libraries that its workers compute with."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from shoal._constants import TORCH_VERSION
from shoal.errors import DeviceSpecError
from shoal.pool.base import limits
from shoal.pool.node import orders
from shoal.pool.node.fork_server import ForkServer
from shoal.pool.node.spec import DeviceSpec, cpu_model, host_memory_bytes
from shoal.pool.wire import frames
from shoal.units import show_bytes


def facts(spec: DeviceSpec, forks: ForkServer) -> orders.DeviceFacts:
    """Return what a device is. A throw-away process asks an accelerator.

    Its runtime must not start here or in the fork server: a process that has started CUDA cannot
    fork one that uses it.
    """
    if spec.device == "cpu":
        name = cpu_model()[: limits.NAME_CHARS_MAX]
        return orders.DeviceFacts(name, host_memory_bytes() * 8 // 10)
    child = forks.fork()
    try:
        frames.send(child.line, orders.ProbeDevice(spec.device))
        child.line.settimeout(limits.PROBE_DEVICE_S)
        answer, _ = frames.receive(child.line, orders.FROM_CHILD)
    except frames.Silence:
        raise DeviceSpecError(
            f"{spec.device} did not answer in {limits.PROBE_DEVICE_S:g} s. Is its driver stuck? "
            "Look there with: dmesg"
        ) from None
    except (frames.Closed, frames.Broken):
        raise DeviceSpecError(
            f"the process that asked {spec.device} for its name and memory died. Does torch work on "
            f'it? Try: python -c "import torch; torch.ones(1, device={spec.device!r})"'
        ) from None
    finally:
        child.kill()
        forks.reap(child)
    if isinstance(answer, orders.DeviceFacts):
        return answer
    raise DeviceSpecError(f"{spec.device}: {getattr(answer, 'reason', answer)}")


def offered_bytes(spec: DeviceSpec, found: orders.DeviceFacts) -> int:
    """Return what one session can have: a context comes off the device's memory, declared or not."""
    memory_bytes = spec.memory_bytes or found.memory_bytes
    if memory_bytes <= found.context_bytes:
        raise DeviceSpecError(
            f"{spec.name}: its {show_bytes(memory_bytes)} do not hold more than a context of "
            f"{spec.device}, which takes {show_bytes(found.context_bytes)}. Declare more memory"
        )
    return memory_bytes - found.context_bytes


def kind(spec: DeviceSpec, found: orders.DeviceFacts) -> str:
    """Return the text that a request's `kind=` must match."""
    if spec.kind or spec.device == "cpu":
        return spec.kind or "cpu"
    return found.name


def load_libraries(spec: DeviceSpec) -> None:
    """Load torch's libraries and the core, so that every forked worker has them.

    A CPU device does without torch's Python package, whose import takes two seconds: a pool starts,
    and recovers after a fault, that much sooner.
    """
    if spec.device == "cpu":
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"torch is missing. Type: pip install torch=={TORCH_VERSION}")
        for name in ("libtorch_global_deps.so", "libtorch_python.so"):
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    else:
        import torch  # noqa: F401

    from shoal import _core  # noqa: F401


def probe(device: str) -> orders.DeviceFacts:
    """Start a device's runtime in this process, and ask it. This process must end soon."""
    from shoal.pool.node import device_probe

    return device_probe.facts(device)
