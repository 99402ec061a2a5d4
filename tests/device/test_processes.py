"""The device beside other processes and threads: DataLoader workers, forks, threads, import."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal_autoload
from shoal.device import registration
from tests.support import programs
from tests.support.compare import close, same_bits

# --- DataLoader --------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_with_pinned_memory(workers: int) -> None:
    features = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, torch.arange(64))
    loader = DataLoader(data, batch_size=16, num_workers=workers, pin_memory=True)
    seen = []
    for batch, labels in loader:
        assert batch.is_pinned()
        copied = torch.shoal.traffic()["bytes_copied_by_client"]
        remote = batch.to("shoal", non_blocking=True)
        assert torch.shoal.traffic()["bytes_copied_by_client"] == copied
        same_bits(remote, features[labels])
        seen += labels.tolist()
    assert seen == list(range(64))


def test_a_data_loader_that_persists_beside_training() -> None:
    data = TensorDataset(torch.randn(32, 8))
    loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
    layer = torch.nn.Linear(8, 1).to("shoal")
    for _ in range(3):
        for (batch,) in loader:
            layer(batch.to("shoal")).sum().backward()
    assert layer.weight.grad.isfinite().all().item()


# --- threads --------------------------------


def test_many_threads_issue_and_wait_at_once() -> None:
    def work(number: int, device: str) -> list[float]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(20, 20, generator=generator).to(device)
        values = []
        for step in range(40):
            x = torch.tanh(x @ x.t() / 20) + number * 0.01
            if step % 5 == number % 5:
                values.append(x.sum().item())  # waits, each thread at its own time
            if step % 7 == 0:
                values.append(float(x[x > 0].numel()))  # a shape that the device must tell
        return values

    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda n: work(n, "shoal"), range(8)))
    expected = [work(n, "cpu") for n in range(8)]
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_threads_share_tensors_and_transfers() -> None:
    shared = torch.arange(100_000.0, device="shoal")
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                up = torch.full((50_000,), float(number)).to("shoal")
                total = (shared[:50_000] + up).cpu()
                if not torch.equal(total, torch.arange(50_000.0) + number):
                    wrong.append(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_backward_in_several_threads() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(30, 10), torch.randn(10, 3)
    local = w.clone().requires_grad_()
    torch.tanh(x @ local).sum().backward()

    def work(_: int) -> torch.Tensor:
        mine = w.to("shoal").requires_grad_()
        torch.tanh(x.to("shoal") @ mine).sum().backward()
        assert mine.grad is not None
        return mine.grad.cpu()

    with ThreadPoolExecutor(4) as pool:
        for gradient in pool.map(work, range(12)):
            close(gradient, local.grad)


# --- fork --------------------------------

FORK = """
    import os, sys, torch
    x = torch.ones(1000, device="shoal")
    pinned = torch.ones(5000, pin_memory=True)
    assert x.sum().item() == 1000

    def in_child(name, touch):
        pid = os.fork()
        if pid == 0:
            try:
                touch()
                text = "no error"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            print(name, "|", text.replace(chr(10), " "), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    in_child("use", lambda: x + 1)
    in_child("read", lambda: x.cpu())
    in_child("print", lambda: repr(x))
    in_child("make", lambda: torch.ones(3, device="shoal"))
    in_child("pin", lambda: torch.ones(5000, pin_memory=True).fill_(7))
    in_child("wait", lambda: torch.shoal.synchronize())
    in_child("lease", lambda: __import__("shoal").connect())
    in_child("drop", lambda: globals().pop("x"))
    in_child("local", lambda: torch.ones(3).sum().item())
    assert x.sum().item() == 1000
    assert pinned.sum().item() == 5000
    y = x.clone().mul_(2)
    assert y.sum().item() == 2000
    print("parent is fine")
"""


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on() -> None:
    out = programs.succeed(FORK)
    lines = dict(line.split(" | ") for line in out.splitlines() if " | " in line)
    for name in ("use", "read", "print", "make", "pin", "wait", "lease"):
        assert "fork" in lines[name], f"{name}: {lines[name]}"
    assert lines["drop"] == lines["local"] == "no error"
    assert out.endswith("parent is fine\n")


def test_a_fork_before_the_first_use_may_use_the_device() -> None:
    out = programs.succeed(
        """
        import os, torch
        pid = os.fork()
        if pid == 0:
            ok = torch.ones(5, device="shoal").sum().item() == 5
            os._exit(0 if ok else 1)
        status = os.waitpid(pid, 0)[1]
        print(status, torch.ones(4, device="shoal").sum().item())
        """
    )
    assert out == "0 4.0\n"


# --- import torch --------------------------------

IMPORT = """
    import os, sys, threading
    import torch
    tasks = sorted(open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task"))
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    kinds = sorted(
        os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    )
    print(len(tasks), len(children), kinds)
    print("shoal.pool.local.local_pool" in sys.modules, "transformers" in sys.modules)
    if len(sys.argv) > 1:
        print(torch.device("shoal"), torch.shoal.is_initialized(), torch.shoal.is_available())
"""


def test_importing_torch_starts_nothing() -> None:
    with_device = programs.succeed(IMPORT, "describe").splitlines()
    without = programs.succeed(IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert with_device[0] == without[0]  # threads, children and open files are those of torch alone
    assert with_device[1] == "False False"
    assert with_device[2] == "shoal False False"


def test_a_broken_registration_does_not_break_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no core")

    monkeypatch.setattr(registration, "register", broken)
    with pytest.warns(RuntimeWarning, match="no core"):
        shoal_autoload.autoload()


def test_registering_twice_is_harmless() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal_autoload.autoload()
    assert torch.ones(1, device="shoal").item() == 1


def test_an_exit_handler_reads_the_device() -> None:
    """A program registers it at its top, and uses the device for the first time later."""
    out = programs.succeed(
        """
        import atexit, torch
        kept = []
        atexit.register(lambda: print("at the end:", kept[0].sum().item()))
        kept.append(torch.ones(3, device="shoal"))
        """
    )
    assert out == "at the end: 3.0\n"
