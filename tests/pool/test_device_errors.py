"""An accelerator's errors, by name, on the stand-in: what fails a call, and what ends a session."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.standin.environment import Options, Run
from tests.support import programs

MiB = 2**20
NEIGHBOUR = """
import sys, torch, shoal
with shoal.connect(sys.argv[1], memory="256MiB") as lease:
    x = torch.ones(1000, device="shoal")
    print(x.sum().item(), flush=True)
    sys.stdin.readline()
    print((x + x).sum().item(), flush=True)
"""


@pytest.fixture(scope="module", params=["late"])
def standin(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    run = Run(Options(request.param, devices=1, memory_bytes=2048 * MiB))
    found = run.environment()
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(programs.ROOT)])
    yield found
    assert run.counts().races == 0
    run.close()


def test_a_device_assert_ends_its_session_and_no_other(standin: dict[str, str]) -> None:
    """The other session is another program's, on the same device and device server."""
    source = """
        import json, subprocess, sys, torch, shoal
        from tests.support import processes
        with shoal.up(devices=["cuda:0"]) as pool:
            server = processes.server_pids(pool.url)
            other = subprocess.Popen([sys.executable, "-c", sys.argv[1], pool.url], text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            first = other.stdout.readline()
            lease = shoal.connect(pool.url, memory="256MiB")
            table = torch.zeros(4, 2, device="shoal")
            wrong = table[torch.tensor([9], device="shoal")]
            try:
                wrong.cpu()
            except shoal.DeviceLostError as error:
                lost = str(error)
            other.stdin.write(chr(10))
            other.stdin.close()
            found = {
                "lost": lost, "reason": lease.end_reason, "neighbour": first + other.stdout.read(),
                "code": other.wait(), "same server": processes.server_pids(pool.url) == server,
            }
            with shoal.connect(pool.url, memory="256MiB"):
                found["again"] = torch.ones(3, device="shoal").sum().item()
            print(json.dumps(found))
    """
    found = json.loads(programs.succeed(source, NEIGHBOUR, **standin))
    assert "the device failed: CUDA error: device-side assert triggered" in found["lost"]
    assert "index 9 is out of bounds" in found["lost"]
    assert "SHOAL_BLOCKING=1" in found["lost"]
    assert "the device failed" in found["reason"]
    assert found["neighbour"].split() == ["1000.0", "2000.0"]
    assert found["code"] == 0
    assert found["same server"]
    assert found["again"] == 3.0


#: Trains with one failing driver call after the other, and prints what each became.
TRAINING = """
    import ctypes, json, mmap, os, struct, sys
    import torch, shoal
    from tests.support import processes
    from tests.support.waiting import wait_until

    state = mmap.mmap(os.open(os.environ["STANDIN_STATE"], os.O_RDWR), 4096)
    nvml = ctypes.CDLL(os.environ["SHOAL_NVML"])
    calls = lambda: struct.unpack_from("Q", state, 8)[0]
    let_fail = lambda number: struct.pack_into("Q", state, 24, number)

    def used():
        handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        return memory[2]

    def train(url, until):
        with shoal.connect(url):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
            model.to("shoal")
            optimizer = torch.optim.AdamW(model.parameters())
            losses = []
            for step in range(40):
                loss = model(torch.ones(4, 8).to("shoal")).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if step > 1 and calls() > until:
                    return losses
            return losses

    with shoal.up(devices=["cuda:0"]) as pool:
        server, = processes.server_pids(pool.url)
        descriptors = lambda: len(os.listdir(f"/proc/{server}/fd"))
        idle = lambda: not processes.forked(server)
        expected = train(pool.url, 10**9)
        wait_until(idle, 30, "the worker has ended")
        bytes_before, descriptors_before = used(), descriptors()
        for n in json.loads(sys.argv[1]):
            at = calls() + n
            let_fail(at)
            try:
                losses = train(pool.url, at)
                found = ["none", "equal" if losses == expected[: len(losses)] else str(losses)]
            except (shoal.ShoalError, RuntimeError) as error:
                found = [type(error).__name__, str(error)]
            let_fail(0)
            assert calls() >= at, (n, calls(), at)
            wait_until(idle, 30, "the worker has ended")
            wait_until(lambda: used() == bytes_before, 30, "the device is empty")
            wait_until(lambda: descriptors() <= descriptors_before, 30, "no descriptor is left")
            assert processes.server_pids(pool.url) == [server]
            print(json.dumps([n, *found]), flush=True)
        train(pool.url, 0)
        print(json.dumps("trained"))
"""


def outcomes(standin: dict[str, str], numbers: list[int], timeout: float) -> None:
    text = programs.succeed(TRAINING, json.dumps(numbers), timeout=timeout, **standin)
    *found, last = [json.loads(line) for line in text.splitlines()]
    assert last == "trained"
    assert [n for n, *_ in found] == numbers
    assert sum(kind == "none" for _, kind, _ in found) <= len(found) // 4
    for n, kind, text in found:
        if kind == "none":  # torch's allocator asked again for less
            assert text == "equal", (n, text)
            continue
        # An operator's own error is that of local torch; the rest ends the session, or its start.
        own = kind == "RuntimeError" and "[shoal] raised by" in text
        assert own or kind in ("DeviceLostError", "OutOfMemoryError", "LeaseError"), (n, kind, text)
        assert "CUDA" in text, (n, kind, text)


def test_a_driver_call_that_fails_is_a_named_error(standin: dict[str, str]) -> None:
    outcomes(standin, [1, 20, 50], 110)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_driver_call_may_fail(standin: dict[str, str]) -> None:
    outcomes(standin, list(range(1, 201)), 890)
