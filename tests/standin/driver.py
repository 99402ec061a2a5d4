"""The fake driver for Python, as tests and tools call it. A process has one."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from typing import Any

PAGE = 2 << 20
_DEVICE = 1  # where memory is: CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3
_POSIX_FD = 1

NOT_INITIALIZED = 3
OUT_OF_MEMORY = 2
NOT_READY = 600
ILLEGAL_ADDRESS = 700
UNKNOWN = 999


class DriverError(Exception):
    """A call that did not return CUDA_SUCCESS."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", _Location),
                ("unused", c_void_p), ("flags", c_uint64)]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class Driver:
    """The driver, started, with device 0's context (or another's)."""

    def __init__(self, path: str, device: int = 0) -> None:
        self.library = ctypes.CDLL(path)
        self.device = device
        context = c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise DriverError(name, code)

    def create(self, size: int, device: int | None = None) -> c_uint64:
        """Return a handle of device memory."""
        handle = c_uint64()
        where = _Location(_DEVICE, self.device if device is None else device)
        wanted = _Properties(1, _POSIX_FD, where, None, 0)
        self("cuMemCreate", ctypes.byref(handle), c_size_t(size), ctypes.byref(wanted), c_uint64(0))
        return handle

    def map(self, handle: c_uint64, size: int, devices: tuple[int, ...] = ()) -> int:
        """Return an address at which the devices may use the memory."""
        address = c_uint64()
        self("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), c_size_t(0), c_uint64(0),
             c_uint64(0))  # fmt: skip
        self("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        users = devices or (self.device,)
        access = (_Access * len(users))(
            *(_Access(_Location(_DEVICE, d), _READ_WRITE) for d in users)
        )
        self("cuMemSetAccess", address, c_size_t(size), access, c_size_t(len(users)))
        return address.value

    def allocate(self, size: int = PAGE) -> int:
        """Return the address of new device memory."""
        handle = self.create(size)
        address = self.map(handle, size)
        self("cuMemRelease", handle)
        return address

    def export(self, handle: c_uint64) -> int:
        """Return a descriptor of the memory, for another process."""
        fd = c_int()
        self("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, c_uint64(0))
        return fd.value

    def take(self, fd: int) -> c_uint64:
        """Return a handle of another process's memory."""
        handle = c_uint64()
        self("cuMemImportFromShareableHandle", ctypes.byref(handle), c_void_p(fd), _POSIX_FD)
        return handle

    def host(self, size: int = 4096) -> ctypes.Array[ctypes.c_char]:
        """Return registered host memory."""
        memory = ctypes.create_string_buffer(size)
        self("cuMemHostRegister_v2", memory, c_size_t(size), 0)
        return memory

    def stream(self) -> c_void_p:
        """Return a new stream."""
        stream = c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream

    def event(self) -> c_void_p:
        """Return a new event."""
        event = c_void_p()
        self("cuEventCreate", ctypes.byref(event), 0)
        return event

    def copy(self, to: Any, source: Any, size: int, stream: c_void_p | None = None) -> None:
        """Queue a copy. Addresses are numbers or buffers."""
        self("cuMemcpyAsync", _address(to), _address(source), c_size_t(size), stream)

    def fill(self, to: int, value: int, size: int, stream: c_void_p | None = None) -> None:
        """Queue filling device memory with a byte."""
        self("cuMemsetD8Async", c_uint64(to), ctypes.c_ubyte(value), c_size_t(size), stream)

    def free_bytes(self) -> int:
        """Return what the device has left."""
        free, total = c_size_t(), c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


def _address(of: Any) -> c_uint64:
    return c_uint64(of if isinstance(of, int) else ctypes.addressof(of))
