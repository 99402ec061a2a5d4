"""What this machine's GPUs say of themselves: memory that all programs use, load, heat and power.

The driver's NVML answers, without a context on any device. Python reaches it by nvidia-ml-py
(`pip install nvidia-ml-py`). Where either is missing, a pool shows everything but this.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shoal.pool.wire.messages import GpuState

_log = logging.getLogger(__name__)


class Gpus:
    """The GPUs of this machine, by the names that their driver gives them (`GPU-…`)."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}

    def open(self) -> bool:
        """Load the library. Return whether there is one."""
        try:
            import pynvml
        except ImportError:
            _log.info(
                "load and temperature of GPUs are not shown: run pip install nvidia-ml-py for them"
            )
            return False
        path = os.environ.get("SHOAL_NVML")
        try:
            if path and pynvml.nvmlLib is None:
                pynvml.nvmlLib = ctypes.CDLL(path)
            pynvml.nvmlInit()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._handles[_text(pynvml.nvmlDeviceGetUUID(handle))] = handle
        except (OSError, pynvml.NVMLError) as error:
            _log.info("load and temperature of GPUs are not shown: %s", error)
            return False
        self._nvml = pynvml
        return True

    def look(self, names: Iterable[str]) -> dict[str, GpuState]:
        """Return the state of those of the named GPUs that answer."""
        found = {}
        for name in names:
            handle = self._handles.get(name)
            state = self._state(handle) if handle is not None else None
            if state is not None:
                found[name] = state
        return found

    def _state(self, handle: Any) -> GpuState | None:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return None  # it has fallen off the bus, or belongs to somebody else
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return GpuState(
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            busy=rates.gpu / 100 if rates is not None else None,
            celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            watts=power / 1000 if power is not None else None,
            watts_max=limit / 1000 if limit is not None else None,
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer; None if this GPU does not give it."""
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
