"""What the driver's calls cost, without Shoal: the ground that Shoal's figures stand on."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from bench.first_hour.finding import Finding

MiB, GiB = 2**20, 2**30


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", _Location),
                ("unused", c_void_p), ("flags", c_uint64)]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class Driver:
    """CUDA's driver library, with a context on device 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("SHOAL_CUDA_DRIVER") or "libcuda.so.1")
        context = c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", byref(context), 0)
        self("cuCtxSetCurrent", context)
        self.stream = c_void_p()
        self("cuStreamCreateWithPriority", byref(self.stream), 1, 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def wait(self) -> None:
        """Wait for the stream."""
        self("cuStreamSynchronize", self.stream)

    def map(self, size: int) -> tuple[c_uint64, c_uint64]:
        """Make and map device memory. Return its address and its handle."""
        handle, address = c_uint64(), c_uint64()
        wanted = _Properties(1, 1, _Location(1, 0), None, 0)
        self("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64(0))
        self("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0),
             c_uint64(0))  # fmt: skip
        self("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        access = _Access(_Location(1, 0), 3)
        self("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        return address, handle


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the time of one call, after one that does not count."""
    work()
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def check(quick: bool) -> Iterator[Finding]:
    """Measure copies, registration, mapping and events."""
    driver = Driver()
    size = (16 if quick else 256) * MiB
    start = time.perf_counter()
    address, _ = driver.map(size)
    mapped_s = time.perf_counter() - start
    yield Finding("map 64 MiB of device memory", mapped_s * 64 * MiB / size * 1e3, "ms", 0.02, 10)
    host = ctypes.create_string_buffer(size)
    for position in range(0, size, 4096):  # the first touch is not what is measured
        host[position] = b"1"
    start = time.perf_counter()
    driver("cuMemHostRegister_v2", host, c_size_t(size), 0)
    registered_s = time.perf_counter() - start
    yield Finding("register 1 GiB of host memory", registered_s * GiB / size * 1e3, "ms", 20, 1000)

    there = c_uint64(ctypes.addressof(host))

    def copy(to: c_uint64, source: c_uint64) -> None:
        driver("cuMemcpyAsync", to, source, c_size_t(size), driver.stream)
        driver.wait()

    times = 2 if quick else 10
    yield Finding(
        "copy to the device, registered", size / seconds(lambda: copy(address, there), times) / 1e9,
        "GB/s", 5, 60, "PCIe 3 x16: 12; 4: 25; 5: 50",
    )  # fmt: skip
    yield Finding(
        "copy from the device, registered",
        size / seconds(lambda: copy(there, address), times) / 1e9, "GB/s", 5, 60,
    )  # fmt: skip
    yield from _events(driver)


def _events(driver: Driver) -> Iterator[Finding]:
    event = c_void_p()
    driver("cuEventCreate", byref(event), 2)
    record = seconds(lambda: driver("cuEventRecord", event, driver.stream), 200)
    driver.wait()
    yield Finding("record an event", record * 1e6, "µs", 0.2, 10)
    page = ctypes.create_string_buffer(8192)
    start = (ctypes.addressof(page) + 4095) & ~4095
    driver("cuMemHostRegister_v2", c_void_p(start), c_size_t(4096), 2)
    word, value = c_uint64(start), c_uint64(1)

    def tell() -> None:
        driver("cuStreamWriteValue64_v2", driver.stream, word, value, 0)

    yield Finding("let the device write a word: issue", seconds(tell, 200) * 1e6, "µs", 0.2, 20)
    driver.wait()

    def answer() -> None:
        value.value += 1
        tell()
        found = ctypes.c_uint64.from_address(start)
        deadline = time.perf_counter() + 1
        while found.value != value.value and time.perf_counter() < deadline:
            pass

    yield Finding("… until the host sees it", seconds(answer, 20) * 1e6, "µs", 2, 100)
    driver.wait()
