"""`torch.shoal.memory_*`: what this program uses of a device's memory."""

from __future__ import annotations

from typing import Any

from shoal import _core


def _index(device: Any) -> int:
    from shoal.device import module

    return module._index(device)


def _use(device: Any) -> dict[str, int]:
    return _core.memory_use(_index(device)) if _core.device_count() else {}


def memory_allocated(device: Any = None) -> int:
    """Return the bytes in live tensors.

    >>> torch.shoal.memory_allocated() // 2**20  # MiB
    """
    return _use(device).get("allocated_bytes", 0)


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes in live tensors since `reset_peak_memory_stats`.

    >>> torch.shoal.reset_peak_memory_stats()
    >>> y = x @ x
    >>> torch.shoal.max_memory_allocated()
    """
    return _use(device).get("peak_bytes", 0)


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the worker holds, with those it keeps for later allocations.

    >>> torch.shoal.memory_reserved()
    """
    if not _core.device_count():
        return 0
    index = _index(device)
    return max(_core.worker_stats(index)["reserved_bytes"], memory_allocated(device))


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes that the worker held or live tensors had.

    >>> torch.shoal.max_memory_reserved()
    """
    return max(memory_reserved(device), max_memory_allocated(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin again to count `max_memory_allocated`.

    >>> torch.shoal.reset_peak_memory_stats()
    """
    if _core.device_count():
        _core.reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of the device's own memory; more may be swapped out.

    >>> free_bytes, total_bytes = torch.shoal.mem_get_info()
    """
    from shoal.device import module

    module._lazy_init()
    use = _use(device)
    total = use["memory_bytes"]
    return max(0, total - use["allocated_bytes"]), total


def empty_cache() -> None:
    """Return memory that workers keep for later to their machines.

    >>> del y
    >>> torch.shoal.empty_cache()
    """
    if _core.device_count():
        _core.trim()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return counters under `torch.cuda.memory_stats`' names, and the worker's own.

    >>> torch.shoal.memory_stats()["allocated_bytes.all.peak"]
    """
    if not _core.device_count():
        return {}
    index = _index(device)
    use, worker = _core.memory_use(index), _core.worker_stats(index)
    stats = {
        "allocated_bytes.all.current": use["allocated_bytes"],
        "allocated_bytes.all.peak": use["peak_bytes"],
        "reserved_bytes.all.current": max(worker["reserved_bytes"], use["allocated_bytes"]),
        "allocation.all.current": use["allocations"] - use["frees"],
        "allocation.all.allocated": use["allocations"],
        "allocation.all.freed": use["frees"],
        "memory_bytes": use["memory_bytes"],
        "limit_bytes": use["limit_bytes"],
    }
    return stats | {f"worker.{name}": value for name, value in worker.items()}


def memory_summary(device: Any = None) -> str:
    """Return a readable table of the counters.

    >>> print(torch.shoal.memory_summary())
    """
    stats = memory_stats(device)
    width = max((len(name) for name in stats), default=0)
    lines = [f"shoal:{_index(device)} memory"]
    lines += [f"  {name:<{width}}  {value:>16,}" for name, value in stats.items()]
    return "\n".join(lines)


def traffic(device: Any = None) -> dict[str, int]:
    """Return messages and bytes between client and device, and bytes that the client copied.

    `issued` and `done` count messages that the worker has handed to the device, and those that the
    device has finished. On a CPU device the two are equal.

    >>> torch.shoal.traffic()["bytes_in"]
    """
    return _core.traffic(_index(device)) if _core.device_count() else {}
