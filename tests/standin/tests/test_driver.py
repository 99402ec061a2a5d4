"""The fake driver refuses what a driver refuses."""

from __future__ import annotations

import signal

from tests.standin.environment import Options, Run
from tests.standin.tests.children import finish, lines, spawn


def test_the_host_cannot_touch_device_memory() -> None:
    child, _ = lines(Options(), "ctypes.string_at(start().allocate(), 1)")
    assert child.code == -signal.SIGSEGV


def test_copies_reach_device_memory() -> None:
    child, counts = lines(
        Options(),
        """
        driver = start()
        there, here = driver.allocate(), driver.host()
        here.value = b"through the device"
        driver.copy(there, here, 4096)
        back = driver.host()
        driver.copy(back, there, 4096)
        driver("cuCtxSynchronize")
        print(back.value.decode().replace(" ", "-"))
        """,
    )
    assert child.output == ["through-the-device"], child.errors
    assert counts.driver_calls > 10
    assert counts.races == 0


def test_a_child_of_a_process_that_started_the_driver_cannot_use_it() -> None:
    child, _ = lines(
        Options(),
        """
        driver = start()
        if os.fork() == 0:
            print(code_of("cuInit", start), flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    assert child.output == ["3"], child.errors  # CUDA_ERROR_NOT_INITIALIZED


def test_a_child_of_a_process_that_only_loaded_it_can() -> None:
    child, _ = lines(
        Options(),
        """
        ctypes.CDLL(os.environ["SHOAL_CUDA_DRIVER"])
        if os.fork() == 0:
            start().allocate()
            print("runs", flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    assert child.output == ["runs"], child.errors


def test_the_call_with_the_number_fails_and_no_other() -> None:
    program = """
        driver = start()
        for _ in range(12):
            print(code_of("fill", driver.fill, 0, 0, 0))
        """
    child, _ = lines(Options(fail_call=8), program)
    assert child.output.count("999") == 1, child.errors
    assert child.output.index("999") == 8 - 1 - 3, child.output  # behind init, retain, set


def test_memory_and_a_context_are_counted_and_given_back() -> None:
    child, _ = lines(
        Options(memory_bytes=128 << 20),
        """
        driver = start()
        before = driver.free_bytes()
        handle = driver.create(32 << 20)
        print(before >> 20, (before - driver.free_bytes()) >> 20)
        print(code_of("create", driver.create, 66 << 20))
        driver("cuMemRelease", handle)
        print((before - driver.free_bytes()) >> 20)
        """,
    )
    assert child.output == ["96", "32", "2", "0"], child.errors


def test_tenants_fill_one_device_together() -> None:
    run = Run(Options(memory_bytes=256 << 20))
    fill = """
        driver = start()
        count = 0
        while code_of("create", driver.create, 16 << 20) == 0:
            count += 1
        print(count, flush=True)
        sys.stdin.read()
        """
    try:
        first = spawn(run, fill)
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "14"  # of 16: a context costs 32 MiB
        second = finish(spawn(run, "print(code_of('start', start))"))
        assert second.output == ["2"], second.errors  # not even a context
        first.kill()  # a process that ends owns nothing
        first.communicate()
        third = spawn(run, fill)
        assert finish(third).output == ["14"]
    finally:
        run.close()


def test_an_access_that_is_not_mapped_condemns_the_context() -> None:
    child, _ = lines(
        Options(),
        """
        driver = start()
        address = driver.allocate()
        driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(PAGE))
        print(code_of("fill", driver.fill, address, 1, 16))
        for _ in range(2):
            print(code_of("sync", driver, "cuCtxSynchronize"))
        """,
    )
    assert child.output == ["0", "700", "700"], child.errors


def test_another_process_maps_the_same_memory() -> None:
    child, _ = lines(
        Options(),
        """
        ours, theirs = os.pipe()
        import socket
        left, right = socket.socketpair()
        if os.fork() == 0:
            driver = start()
            handle = driver.create(PAGE)
            driver.fill(driver.map(handle, PAGE), 65, 8)
            driver("cuCtxSynchronize")
            socket.send_fds(left, [b"x"], [driver.export(handle)])
            left.recv(1)
            os._exit(0)
        _, fds, _, _ = socket.recv_fds(right, 1, 1)
        driver = start()
        there = driver.map(driver.take(fds[0]), PAGE)
        here = driver.host()
        driver.copy(here, there, 8)
        driver("cuCtxSynchronize")
        print(here.value.decode())
        right.send(b"x")
        os.wait()
        """,
    )
    assert child.output == ["AAAAAAAA"], child.errors


def test_functions_are_found_by_name() -> None:
    child, _ = lines(
        Options(),
        """
        driver = start()
        found = ctypes.c_void_p()
        for name in (b"cuMemGetInfo", b"cuStreamWriteValue64", b"cuNothing"):
            code = driver.library.cuGetProcAddress_v2(
                name, ctypes.byref(found), 13000, ctypes.c_uint64(0), None)
            print(code, bool(found.value))
        """,
    )
    assert child.output == ["0", "True", "0", "True", "500", "False"], child.errors


def test_nvml_knows_the_devices_without_starting_a_context() -> None:
    child, _ = lines(
        Options(devices=2, memory_bytes=1 << 30),
        """
        nvml = ctypes.CDLL(os.environ["SHOAL_NVML"])
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        memory, count = (ctypes.c_ulonglong * 3)(), ctypes.c_uint()
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(handle))
        nvml.nvmlDeviceGetName(handle, name, 64)
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        print(count.value, name.value.decode().replace(" ", "-"), memory[0] >> 20, memory[2] >> 20)
        start(1)
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        print(memory[2] >> 20)
        """,
    )
    assert child.output == ["2", "stand-in-1", "1024", "0", "32"], child.errors
