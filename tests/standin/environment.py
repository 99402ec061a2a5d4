"""The environment in which Shoal's device servers have the stand-in, and what a run counted."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.standin import build

MODES = ("now", "late", "threads", "random")
_STATE_BYTES = 1 << 20
_COUNTERS = struct.Struct("4Q")  # kernels, driver calls, races, the call that fails


@dataclass(frozen=True)
class Counts:
    """What all processes of a run did so far."""

    kernels: int
    driver_calls: int
    races: int

    def __str__(self) -> str:
        return f"kernels={self.kernels} driver_calls={self.driver_calls} races={self.races}"


@dataclass(frozen=True)
class Options:
    """How the stand-in behaves; None: its own default."""

    mode: str = "late"
    devices: int = 1
    memory_bytes: int | None = None  # of each device
    seed: int | None = None
    fail_call: int = 0  # the number of the driver call that fails, over all processes; 0: none


class Run:
    """A stand-in that several processes share, from its start to its end."""

    def __init__(self, options: Options) -> None:
        self._libraries = build.libraries()
        self._options = options
        handle, path = tempfile.mkstemp(prefix="shoal-standin-")
        self._path = Path(path)
        os.ftruncate(handle, _STATE_BYTES)
        self._state = mmap.mmap(handle, _STATE_BYTES)
        os.close(handle)
        self.fail_call(options.fail_call)

    def environment(self) -> dict[str, str]:
        """Return the variables that a child process needs in addition."""
        here = Path(__file__).resolve().parent
        options = self._options
        found = {
            "SHOAL_TEST_STANDIN": str(here / "load.py"),
            "SHOAL_CUDA_DRIVER": str(self._libraries.driver),
            "SHOAL_NVML": str(self._libraries.nvml),
            "STANDIN_MODE": options.mode,
            "STANDIN_DEVICES": str(options.devices),
            "STANDIN_STATE": str(self._path),
            "PYTHONPATH": os.pathsep.join(
                path for path in (str(here / "site"), os.environ.get("PYTHONPATH")) if path
            ),
        }
        if options.memory_bytes is not None:
            found["STANDIN_MEMORY_BYTES"] = str(options.memory_bytes)
        if options.seed is not None:
            found["STANDIN_SEED"] = str(options.seed)
        return found

    def counts(self) -> Counts:
        """Return what has been counted."""
        kernels, calls, races, _ = _COUNTERS.unpack_from(self._state)
        return Counts(kernels, calls, races)

    def fail_call(self, number: int) -> None:
        """Let the driver call with this number fail; 0: none."""
        struct.pack_into("Q", self._state, 24, number)

    def close(self) -> None:
        """Forget the shared state. Processes that still run keep it until they end."""
        self._state.close()
        self._path.unlink(missing_ok=True)
