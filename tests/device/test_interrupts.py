"""Ctrl-C while the program waits for its device: it is heard at once, and the device works on."""

from __future__ import annotations

import pytest

from tests.support import programs

#: Stops the device's worker, waits for it and interrupts that wait. A worker counts as lost after
#: four seconds of silence. A busy machine may interrupt too late for that: then it tries again.
PROGRAM = """
    import os, signal, threading, time
    import torch, shoal

    def sleeps():
        # In a backward pass another thread waits for the device than the main one.
        others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
        return all(wait_of(task) not in ("", "0") for task in others)

    def wait_of(task):
        try:
            with open(f"/proc/self/task/{task}/wchan") as file:
                return file.read()
        except OSError:  # it has just ended
            return ""

    def interrupt():
        asleep = 0
        while asleep < 5 and in_time():
            asleep = asleep + 1 if sleeps() else 0
            time.sleep(0.01)
        if in_time():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

    def in_time():
        return time.monotonic() < stopped_at + 2.5

    def attempt(lease):
        global stopped_at
        big = torch.ones(200_000, device="shoal")
        small = torch.ones(10, device="shoal", requires_grad=True)
        chain = small
        {prepare}
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[0], signal.SIGSTOP)
        stopped_at = time.monotonic()
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        try:
            {waiting}
            print("was not interrupted")
        except KeyboardInterrupt:
            print("heard")
        except shoal.DeviceLostError:
            if not sent.is_set():
                return False
            print("the interrupt was not heard")
        os.kill(lease.worker_pids[0], signal.SIGCONT)
        try:
            print(torch.ones(3, device="shoal").sum().item())  # on the same lease
        except KeyboardInterrupt:
            print("heard twice")
        return True

    sent = threading.Event()
    with shoal.up(devices=["cpu,threads=1"]) as pool:
        for _ in range(6):
            with shoal.connect(pool.url) as lease:
                if attempt(lease):
                    break
        else:
            print("the machine is too busy: no interrupt was sent in time")
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wait", WAITS)
def test_waits_hear_an_interrupt(wait: str) -> None:
    prepare, waiting = WAITS[wait]
    program = PROGRAM.replace("{prepare}", prepare).replace("{waiting}", waiting)
    assert programs.succeed(program, timeout=280).splitlines() == ["heard", "3.0"]


#: torch.save keeps the GIL while it waits for a tensor. The thread needs it thirty times.
SAVING = """
    import io, os, signal, threading, time
    import torch, shoal

    def revive(worker):
        for _ in range(30):
            time.sleep(0.01)
        os.kill(worker, signal.SIGCONT)

    with shoal.up(devices=["cpu,threads=1"]) as pool, shoal.connect(pool.url) as lease:
        x = torch.ones(1000, device="shoal")
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[0], signal.SIGSTOP)
        threading.Thread(target=revive, args=lease.worker_pids[:1], daemon=True).start()
        file = io.BytesIO()
        torch.save(x + 1, file)
        file.seek(0)
        print(torch.load(file, map_location="cpu").sum().item())
"""


def test_other_threads_run_while_a_tensor_is_saved() -> None:
    """They could not, so the thread that keeps a lease fell silent, and the lease was taken back."""
    assert programs.succeed(SAVING).split() == ["2000.0"]
