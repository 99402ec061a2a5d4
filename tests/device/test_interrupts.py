"""Ctrl-C while the program waits for its device: it is heard at once, and the device works on."""

from __future__ import annotations

import pytest

from tests.support import programs

#: Stops the device's worker, waits for it and interrupts that wait. A worker counts as lost after
#: four seconds of silence, so the signal has to be heard before that.
PROGRAM = """
    import os, signal, threading, time
    import torch, shoal

    def sleeps():
        with open(f"/proc/self/task/{os.getpid()}/wchan") as file:
            return file.read() not in ("", "0")

    def interrupt():
        deadline = time.monotonic() + 60
        asleep = 0
        while asleep < 20 and time.monotonic() < deadline:
            asleep = asleep + 1 if sleeps() else 0
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with shoal.up(devices=["cpu,threads=1"]) as pool, shoal.connect(pool.url) as lease:
        big = torch.ones(200_000, device="shoal")
        small = torch.ones(10, device="shoal", requires_grad=True)
        chain = small
        {prepare}
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[0], signal.SIGSTOP)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            {waiting}
            print("was not interrupted")
        except KeyboardInterrupt:
            print("heard")
        os.kill(lease.worker_pids[0], signal.SIGCONT)
        try:
            print(torch.ones(3, device="shoal").sum().item())  # on the same lease
        except KeyboardInterrupt:
            print("heard twice")
"""

WAITS = {
    "item": ("pass", "small.sum().item()"),
    "cpu": ("pass", "(big + 1).cpu()"),
    "synchronize": ("pass", "torch.shoal.synchronize()"),
    "event": ("pass", "e = torch.shoal.Event(); e.record(); e.synchronize()"),
    "a shape that depends on values": ("pass", "torch.nonzero(small)"),
    "a full op stream": ("pass", "for _ in range(10**6): small.detach() * 2"),
    "a backward pass": ("for _ in range(20_000): chain = chain * 1.0001", "chain.sum().backward()"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_waits_hear_an_interrupt(wait: str) -> None:
    prepare, waiting = WAITS[wait]
    program = PROGRAM.replace("{prepare}", prepare).replace("{waiting}", waiting)
    assert programs.succeed(program).splitlines() == ["heard", "3.0"]
