"""What goes wrong is told where it can be told, with the operator and the user's own line."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from tests.support import programs

MiB = 2**20


def line_here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    line = frame.f_back.f_lineno
    del frame  # it refers to itself, and would keep the caller's tensors until the next collection
    return line


def out_of_range() -> tuple[torch.Tensor, int]:
    """A call that fails at the device, after it returned here; and its line."""
    weight = torch.randn(4, 3, device="shoal")
    index = torch.tensor([0, 9], device="shoal")
    bad, line = nn.functional.embedding(index, weight), line_here()
    return bad, line


def test_an_asynchronous_error_names_operator_and_line() -> None:
    bad, line = out_of_range()
    with pytest.raises(IndexError, match="index out of range") as raised:
        bad.cpu()
    assert "aten::embedding" in str(raised.value)
    assert f"{Path(__file__).name}:{line}" in str(raised.value)
    assert "out_of_range" in str(raised.value)


@pytest.mark.parametrize(
    "synchronise",
    [
        lambda: torch.shoal.synchronize(),
        lambda: torch.accelerator.synchronize(),
        lambda: torch.ones(2, device="shoal").sum().item(),
        lambda: torch.ones(2, device="shoal").nonzero(),
        lambda: torch.ones(100_000, device="shoal").cpu(),
    ],
    ids=["synchronize", "accelerator", "item", "nonzero", "cpu"],
)
def test_every_kind_of_wait_tells_it(synchronise: object) -> None:
    out_of_range()
    assert callable(synchronise)
    with pytest.raises(IndexError, match="aten::embedding"):
        synchronise()


def test_it_is_told_once_and_the_device_goes_on() -> None:
    out_of_range()
    with pytest.raises(IndexError):
        torch.shoal.synchronize()
    torch.shoal.synchronize()
    assert torch.ones(3, device="shoal").sum().item() == 3


def test_what_depends_on_a_failed_call_says_so() -> None:
    (torch.ones(2, 3, device="shoal") * 2).sum()  # a call that is known does not wait
    bad, line = out_of_range()
    later = (bad * 2).sum()
    with pytest.raises(IndexError):
        torch.shoal.synchronize()
    for use in (later.item, bad.cpu, lambda: (later + 1).item()):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            use()
        assert "aten::embedding" in str(raised.value)
        assert f":{line}" in str(raised.value)


def test_a_failed_result_can_be_dropped_and_its_memory_used_again() -> None:
    gc.collect()  # tracebacks of earlier tests hold tensors
    before = torch.shoal.memory_allocated()
    bad, _ = out_of_range()
    with pytest.raises(IndexError):
        torch.shoal.synchronize()
    assert torch.shoal.memory_allocated() > before
    del bad
    assert torch.shoal.memory_allocated() == before


def test_the_first_of_several_errors_is_told_first() -> None:
    _, line = out_of_range()
    torch.gather(torch.ones(2, device="shoal"), 0, torch.tensor([7], device="shoal"))
    with pytest.raises((IndexError, RuntimeError), match=f":{line} "):
        torch.shoal.synchronize()
    torch.shoal.synchronize()


def test_an_error_in_backward_surfaces() -> None:
    x = torch.randn(3, 4, device="shoal", requires_grad=True)
    target = torch.tensor([0, 1, 99], device="shoal")
    value = nn.functional.cross_entropy(x, target)
    with contextlib.suppress(IndexError, RuntimeError):
        value.backward()  # it may be told here already
        value = x.grad.sum()
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of (bounds|range)"):
        value.item()


def test_errors_that_local_torch_raises_at_once_are_raised_at_once() -> None:
    a, b = torch.ones(2, 3, device="shoal"), torch.ones(4, 5, device="shoal")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        a @ b
    with pytest.raises(IndexError):
        a[5]
    with pytest.raises(RuntimeError, match="must match the size"):
        a + b
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        a.view(7)
    with pytest.raises(TypeError):
        torch.add(a, "b")


BLOCKING = """
    import sys, torch, traceback
    weight = torch.randn(4, 3, device="shoal")
    index = torch.tensor([0, 9], device="shoal")
    try:
        bad = torch.nn.functional.embedding(index, weight)
        print("issued")
        bad.cpu()
    except IndexError as error:
        print("raised at", traceback.extract_tb(error.__traceback__)[0].lineno)
        print("aten::embedding" in str(error))
"""


def test_shoal_blocking_raises_in_the_very_line() -> None:
    assert programs.succeed(BLOCKING, SHOAL_BLOCKING="1").split("\n")[:2] == ["raised at 6", "True"]
    asynchronous = programs.succeed(BLOCKING).split("\n")
    assert asynchronous[:3] == ["issued", "raised at 8", "True"]


# --- out of memory --------------------------------


def waits_for(work: Callable[[], object]) -> tuple[torch.Tensor, torch.Event]:
    """Something on its way to pinned memory, and the event that it has come."""
    host = torch.full((), -1.0, pin_memory=True)
    arrived = torch.Event("shoal")
    bad = work()
    assert isinstance(bad, torch.Tensor)
    host.copy_(bad.sum(), non_blocking=True)
    arrived.record()
    return host, arrived


def test_every_wait_for_an_event_behind_a_failure_tells_it() -> None:
    """Also where another thread has asked before, and was told."""
    _, arrived = waits_for(lambda: out_of_range()[0])
    with pytest.raises(IndexError, match="index out of range"):
        torch.shoal.synchronize()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            arrived.synchronize()
        except Exception as error:
            raised.append(error)

    for _ in range(2):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert [type(error) for error in raised] == [IndexError, IndexError]
    assert "aten::embedding" in str(raised[0])


def test_an_event_behind_the_use_of_a_poisoned_value_tells_it() -> None:
    """Its cause was told long ago; that the value is used again is news."""
    bad, _ = out_of_range()
    with pytest.raises(IndexError, match="index out of range"):
        torch.shoal.synchronize()
    _, arrived = waits_for(lambda: bad)
    with pytest.raises(IndexError, match="index out of range"):
        torch.shoal.synchronize()
    with pytest.raises(IndexError, match="index out of range"):
        arrived.synchronize()


def test_an_event_tells_nothing_that_was_told_before_it() -> None:
    bad, _ = out_of_range()
    with pytest.raises(IndexError, match="index out of range"):
        torch.shoal.synchronize()
    host, arrived = waits_for(lambda: torch.ones(3, device="shoal"))
    with pytest.raises(IndexError, match="index out of range"):
        bad.cpu()  # a read that fails is its reader's alone
    arrived.synchronize()
    assert host.item() == 3


@pytest.fixture
def small(device: torch.device) -> object:
    with (
        shoal.up(["cpu,memory=64MiB,host=0,disk=0,threads=1,name=small"]) as pool,
        shoal.connect(pool.url),
    ):
        yield "shoal"


def test_out_of_memory_names_the_sizes(small: str) -> None:
    kept = torch.ones(2 * MiB, device=small)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(100 * MiB, dtype=torch.uint8, device=small)
    text = str(raised.value)
    assert "shoal:0 (small) is out of memory. Tried to allocate 100 MiB" in text
    assert "8 MiB of 64 MiB are in use" in text
    assert "shoal.connect(" in text
    assert kept.sum().item() == 2 * MiB


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_shell_names_what_to_type(limit: str) -> None:
    """`ulimit -v` and `ulimit -f`, which the machines of a university may set."""
    out = programs.succeed(
        f"""
        import os, resource, torch, shoal
        with shoal.up(["cpu,memory=64MiB,threads=1"]) as pool:
            pages = int(open("/proc/self/statm").read().split()[0])
            few = pages * os.sysconf("SC_PAGESIZE") + (128 << 20)
            resource.setrlimit(resource.{limit}, (few, -1))
            try:
                shoal.connect(pool.url)
            except shoal.LeaseError as error:
                print(error)
            resource.setrlimit(resource.{limit}, (-1, -1))
            shoal.connect(pool.url)
            print(torch.ones(3, device="shoal").sum().item())
        """
    )
    reason, total = out.splitlines()
    assert "ulimit -v unlimited; ulimit -f unlimited" in reason
    assert total == "3.0"


def test_freed_memory_can_be_used_again(small: str) -> None:
    for _ in range(20):
        block = torch.ones(12 * MiB, device=small)  # 48 of 64 MiB: there is room for one
        assert block[-1].item() == 1
        del block


def test_an_operator_whose_result_does_not_fit(small: str) -> None:
    x = torch.ones(10 * MiB, device=small)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x]).sum().item()
    assert x.sum().item() == 10 * MiB


def test_an_operator_whose_temporaries_do_not_fit(small: str) -> None:
    x = torch.ones(11 * MiB, dtype=torch.float32, device=small)  # 44 MiB
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 44 MiB"):
        torch.sort(x)[0].sum().item()
    assert x[0].item() == 1
