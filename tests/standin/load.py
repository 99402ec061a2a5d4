"""What a process runs before `import torch` to have the stand-in as its `cuda`.

$SHOAL_TEST_STANDIN names this file. torch keeps the hooks that it finds first, so this comes before it.
Programs of the user do not run it: they stay without CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_LOADED = "_shoal_standin"


class _Driver:
    """The driver's functions that torch's Python side uses here."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'').decode()} ({name})")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


class _Torch:
    """`torch.cuda` as a CUDA build has it, as far as Shoal asks."""

    def __init__(self, driver: _Driver, backend: ctypes.CDLL) -> None:
        self._driver = driver
        self._backend = backend

    def init(self) -> None:
        self._driver.call("cuInit", 0)

    def count(self) -> int:
        return int(os.environ.get("STANDIN_DEVICES", "1"))

    def index(self, device: Any = None) -> int:
        import torch

        if device is None or isinstance(device, int):
            return device or 0
        return torch.device(device).index or 0

    def properties(self, device: Any = None) -> SimpleNamespace:
        self.init()
        index = self.index(device)
        name = ctypes.create_string_buffer(256)
        self._driver.call("cuDeviceGetName", name, 256, index)
        total = ctypes.c_size_t()
        self._driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), index)
        major, minor, processors = (
            self._driver.number("cuDeviceGetAttribute", attribute, index)
            for attribute in (75, 76, 16)
        )
        return SimpleNamespace(
            name=name.value.decode(), total_memory=total.value, major=major, minor=minor,
            multi_processor_count=processors, is_integrated=0, is_multi_gpu_board=0,
            warp_size=32, uuid=f"stand-in-{index:06d}",
        )  # fmt: skip

    def memory(self, device: Any = None) -> tuple[int, int]:
        self.init()
        context = ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.index(device))
        self._driver.call("cuCtxSetCurrent", context)
        self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def patch(self, cuda: ModuleType) -> None:
        """Replace what a CPU build refuses."""
        import torch

        replaced: dict[str, Any] = {
            "is_available": lambda: self.count() > 0,
            "device_count": self.count,
            "_lazy_init": self.init,
            "init": self.init,
            "_is_compiled": lambda: True,
            "get_device_properties": self.properties,
            "get_device_name": lambda device=None: self.properties(device).name,
            "get_device_capability": lambda device=None: (
                self.properties(device).major,
                self.properties(device).minor,
            ),
            "mem_get_info": self.memory,
            "is_bf16_supported": lambda *_, **__: True,
        }
        for name, function in replaced.items():
            setattr(cuda, name, function)
        torch.version.cuda = "13.0"
        core: Any = torch._C
        core._cuda_customAllocator = lambda allocate, free: (allocate, free)
        core._cuda_changeCurrentAllocator = self._change_allocator

    def _change_allocator(self, allocator: tuple[int, int]) -> None:
        self._backend.standin_set_allocator(*(ctypes.c_void_p(function) for function in allocator))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Patches `torch.cuda` when torch imports it."""

    def __init__(self, torch: _Torch) -> None:
        self._torch = torch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            self._torch.patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def load() -> None:
    """Load driver and backend, once for each process."""
    if _LOADED in sys.modules:
        return
    if "torch" in sys.modules:
        raise ImportError("the stand-in must be loaded before torch")
    folder = Path(os.environ["SHOAL_CUDA_DRIVER"]).parent
    driver = _Driver(os.environ["SHOAL_CUDA_DRIVER"])
    backend = ctypes.CDLL(str(folder / "libshoal_standin.so"), mode=ctypes.RTLD_GLOBAL)
    sys.modules[_LOADED] = ModuleType(_LOADED)
    sys.meta_path.insert(0, _WhenImported(_Torch(driver, backend)))


if __name__ == "__main__":
    raise SystemExit("type: python -m tests.standin late -- CMD…")
load()
