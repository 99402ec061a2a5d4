"""What goes wrong beneath the memory of a lease is named, and stays there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal import _core
from tests.support import processes, programs
from tests.support.disks import file_system
from tests.support.partner import Partner
from tests.support.waiting import wait_until

MiB = 2**20
SMALL = "cpu,memory=8MiB,host=0,disk=64MiB,threads=1"


def fill(count: int) -> list[torch.Tensor]:
    """More than the device holds: the rest has to go to disk."""
    return [torch.full((MiB,), float(i), device="shoal") for i in range(count)]


def fill_up(kept: list[torch.Tensor], count: int) -> None:
    """One MiB after the other, each really there before the next is asked for."""
    for i in range(count):
        kept.append(torch.full((MiB // 4,), float(i), device="shoal"))
        torch.shoal.synchronize()


def test_a_spill_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setenv("SHOAL_SPILL_DIR", str(gone))
    with shoal.up([SMALL]) as pool, shoal.connect(pool.url):
        kept = torch.ones(MiB, device="shoal")
        with pytest.raises(torch.OutOfMemoryError, match=r"SHOAL_SPILL_DIR|spill directory"):
            fill(6)[-1].sum().item()
        assert kept.sum().item() == MiB  # nothing is lost that was there


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """It is full after 8 MiB."""
    with file_system(tmp_path / "small", "size=8m") as where:
        yield where


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """It exists, and not even root can write to it."""
    with file_system(tmp_path / "read-only", "ro") as where:
        yield where


@contextlib.contextmanager
def neighbour(pool: shoal.Pool, **wishes: str) -> Iterator[None]:
    """Another program that has a lease on the pool, and finds its tensor as it left it."""
    with Partner(SHOAL_POOL=pool.url) as other:
        other(f"lease = shoal.connect(**{wishes})")
        other('x = torch.ones(1000, device="shoal")')
        assert other("x.sum().item()") == 1000.0
        yield
        assert other("x.sum().item()") == 1000.0


def test_a_full_disk_is_named_and_loses_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device was promised 64 MiB of disk, and the disk has 8: other sessions never notice."""
    monkeypatch.setenv("SHOAL_SPILL_DIR", str(small_disk))
    plain = "cpu,memory=8MiB,host=0,disk=0,threads=1,kind=plain"
    with shoal.up([SMALL + ",kind=spilling", plain]) as pool, neighbour(pool, kind="plain"):
        with shoal.connect(pool.url, kind="spilling"):
            kept: list[torch.Tensor] = []
            with pytest.raises(torch.OutOfMemoryError, match="No space left on device"):
                fill_up(kept, 24)
            kept.pop()  # the one that could not be made
            assert len(kept) > 8
            assert [t[7].item() for t in kept] == [float(i) for i in range(len(kept))]
            del kept[:6]
            assert torch.ones(MiB // 4, device="shoal").sum().item() == MiB // 4  # it goes on


def test_nothing_is_left_on_disk_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SPILL_DIR", str(tmp_path))
    client = programs.start(
        """
        import shoal, torch
        with shoal.up(["cpu,memory=8MiB,host=0,disk=64MiB,threads=1"]) as pool:
            shoal.connect(pool.url)
            x = [torch.full((2**20,), float(i), device="shoal") for i in range(6)]
            torch.shoal.synchronize()
            print(shoal.memory.counters().disk_bytes > 0, flush=True)
            input()
        """,
        SHOAL_SPILL_DIR=str(tmp_path),
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "True\n"
    children = processes.children(client.pid)
    client.kill()
    client.wait(60)
    wait_until(lambda: not any(map(processes.alive, children)), 30, "the pool is gone")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_spill_directory_is_named(
    read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SPILL_DIR", str(read_only))
    with shoal.up([SMALL]) as pool, shoal.connect(pool.url):
        kept = torch.ones(MiB, device="shoal")
        with pytest.raises(torch.OutOfMemoryError, match="Read-only file system") as raised:
            fill(6)[-1].sum().item()
        assert str(read_only) in str(raised.value)
        assert kept.sum().item() == MiB


def test_nothing_is_left_after_everything_is_killed_at_once(tmp_path: Path) -> None:
    before = processes.shared_memory_files()
    client = programs.start(
        """
        import shoal, torch
        with shoal.up(["cpu,memory=8MiB,host=4MiB,disk=64MiB,threads=1"] * 2) as pool:
            shoal.connect(pool.url, devices=2, memory="100%")
            x = [torch.full((2**20,), float(i), device="shoal") for i in range(10)]
            pinned = torch.ones(2**20).pin_memory()
            handle = shoal.share(x[-1])
            torch.shoal.synchronize()
            print(shoal.memory.counters().disk_bytes > 0, flush=True)
            input()
        """,
        SHOAL_SPILL_DIR=str(tmp_path),
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "True\n"
    everything = [client.pid, *processes.descendants(client.pid)]
    assert len(everything) >= 6  # the program, head, two device servers, two workers
    for pid in everything:
        os.kill(pid, signal.SIGKILL)
    client.wait(60)
    wait_until(lambda: not any(map(processes.alive, everything)), 30, "all are gone")
    assert list(tmp_path.iterdir()) == []
    assert processes.shared_memory_files() <= before


def test_swapped_out_tensors_come_back_from_disk() -> None:
    with shoal.up([SMALL]) as pool, shoal.connect(pool.url):
        tensors = fill(8)
        for i, tensor in enumerate(tensors):
            assert tensor.sum().item() == i * MiB
        assert shoal.memory.counters().disk_bytes > 0


def test_what_finds_no_room_on_a_full_device_is_not_lost() -> None:
    """Device and swap space are full, and what leaves does not make enough room for what comes."""
    with shoal.up(["cpu,memory=7MiB,host=3MiB,disk=0,threads=1"]) as pool, shoal.connect(pool.url):
        large = torch.arange(3 * MiB // 4, device="shoal", dtype=torch.int32)
        small = [torch.full((17 * MiB // 40,), float(i), device="shoal") for i in range(4)]
        torch.shoal.synchronize()
        assert shoal.memory.counters().swapped_out_bytes >= 3 * MiB  # the large one
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                large.sum().item()
            assert [t[-1].item() for t in small] == [0.0, 1.0, 2.0, 3.0]
        small.pop()
        assert torch.equal(large.cpu(), torch.arange(3 * MiB // 4, dtype=torch.int32))
        assert [t.mean().item() for t in small] == [0.0, 1.0, 2.0]


def test_what_is_too_large_for_swap_space_stays_and_smaller_ones_go() -> None:
    """The segment that is used furthest ahead finds no room there, and is not the only one."""
    with shoal.up(["cpu,memory=10MiB,host=3MiB,disk=0,threads=1"]) as pool, shoal.connect(pool.url):
        large = torch.arange(MiB, device="shoal", dtype=torch.int32)  # 4 MiB, not used for longest
        small = [torch.full((MiB // 4,), float(i), device="shoal") for i in range(5)]
        more = torch.ones(MiB // 2, device="shoal")
        assert more.sum().item() == MiB // 2
        assert 0 < shoal.memory.counters().swapped_out_bytes < large.nbytes
        assert [t.mean().item() for t in small] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert torch.equal(large.cpu(), torch.arange(MiB, dtype=torch.int32))


def test_a_device_lost_beside_another_loses_only_its_own() -> None:
    devices = ["cpu,memory=64MiB,threads=1"] * 2
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=2) as lease:
        here = torch.ones(MiB, device="shoal:1")
        there = torch.ones(MiB, device="shoal:2")
        here.sum().item()
        os.kill(lease.worker_pids[1], signal.SIGKILL)
        wait_until(lambda: not processes.alive(lease.worker_pids[1]), 30, "the worker is gone")
        there.add_(1)  # it will never be done
        with pytest.raises(shoal.DeviceLostError, match="lost"):
            there.to("shoal:1").sum().item()
        assert here.sum().item() == MiB


def test_a_copy_elsewhere_takes_the_place_of_a_lost_original() -> None:
    devices = ["cpu,memory=8MiB,host=0,disk=0,threads=1"] * 2
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=2) as lease:
        weight = torch.arange(1000, device="shoal")
        large = torch.ones(5 * MiB // 4, device="shoal")  # fills the first device
        other = torch.ones(4 * MiB // 4, device="shoal")  # so that this is on the second
        other[:1000].add_(weight)  # reads a copy of the weight there
        torch.shoal.synchronize()
        homes = {s.address: s.home for s in shoal.memory.map()}
        home = homes[weight.untyped_storage().data_ptr()]
        assert home is not None
        assert home != homes[other.untyped_storage().data_ptr()]
        os.kill(lease.worker_pids[home - 1], signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            large.sum().item()
        assert torch.equal(weight.cpu(), torch.arange(1000))
        assert (other[:1000] - weight).sum().item() == 1000


def test_a_device_stopped_in_the_middle_of_a_copy_is_named() -> None:
    """The reader waits for its peer's data, gives it up by its heartbeat, and goes on."""
    devices = ["cpu,memory=64MiB,threads=1"] * 2
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=2) as lease:
        here = torch.ones(1000, device="shoal:1")
        there = torch.ones(MiB, device="shoal:2")
        torch.shoal.synchronize()
        os.kill(lease.worker_pids[1], signal.SIGSTOP)
        try:
            there.add_(1)
            copied = there.to("shoal:1")
            with pytest.raises(shoal.DeviceLostError, match="gave no sign of life"):
                copied.sum().item()
            assert here.sum().item() == 1000
        finally:
            os.kill(lease.worker_pids[1], signal.SIGCONT)


@pytest.fixture
def two() -> Iterator[shoal.Lease]:
    """A lease of two devices, whose workers the test may break."""
    devices = ["cpu,memory=64MiB,threads=1"] * 2
    with shoal.up(devices) as pool, shoal.connect(pool.url, devices=2) as lease:
        yield lease


def test_a_device_killed_in_the_middle_of_a_copy_is_named() -> None:
    """The reader sees that its process is no more; nothing else is lost, swapped out or not, here or
    there."""
    spilling = "cpu,memory=16MiB,host=64MiB,disk=16MiB,threads=1"
    devices = [spilling, "cpu,memory=64MiB,threads=1"]
    with shoal.up(devices) as pool, neighbour(pool, memory="25%"):
        with shoal.connect(pool.url, devices=2, memory="50%") as lease:
            kept = [torch.full((MiB,), float(i), device="shoal:1") for i in range(4)]  # 16 of 8 MiB
            there = torch.ones(2 * MiB, device="shoal:2")
            torch.shoal.synchronize()
            os.kill(lease.worker_pids[1], signal.SIGSTOP)
            there.add_(1)
            copied = there.to("shoal:1")  # its reader waits for the other device now
            raised: list[BaseException] = []

            def read() -> None:
                try:
                    copied.sum().item()
                except Exception as error:
                    raised.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            os.kill(lease.worker_pids[1], signal.SIGKILL)
            wait_until(lambda: not reader.is_alive(), 30, "the reader has given up")
            with pytest.raises(shoal.PeerLostError, match="its worker process ended"):
                raise raised[0]
            assert [t.sum().item() / MiB for t in kept] == [0.0, 1.0, 2.0, 3.0]


def test_who_waits_for_a_stopped_device_is_let_go_when_it_is_given_up(two: shoal.Lease) -> None:
    """Until its heart beats again: then it is as before."""
    there = torch.ones(MiB, device="shoal:2")
    torch.shoal.synchronize()
    os.kill(two.worker_pids[1], signal.SIGSTOP)
    try:
        there.add_(1)
        copied = there.to("shoal:1")
        two.give_up(1)
        with pytest.raises(shoal.PeerLostError, match="the program gave its worker up"):
            copied.sum().item()
    finally:
        os.kill(two.worker_pids[1], signal.SIGCONT)
    assert there.to("shoal:1").sum().item() == 2 * MiB


def test_what_a_killed_device_was_to_read_can_be_changed(two: shoal.Lease) -> None:
    """Its reader is no more, so nobody waits for it, and nothing of the survivor's is lost."""
    here = torch.ones(MiB, device="shoal:1")
    torch.shoal.synchronize()
    os.kill(two.worker_pids[1], signal.SIGSTOP)
    copied = here.to("shoal:2")
    os.kill(two.worker_pids[1], signal.SIGKILL)
    here.add_(1)
    assert here.sum().item() == 2 * MiB
    with pytest.raises(shoal.DeviceLostError):
        copied.sum().item()


# --- copies that fail

#: What is done to a tensor on shoal:1 with one on shoal:2.
COPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copied": lambda here, there: here.copy_(there),
    "copied in part": lambda here, there: here[: MiB // 2].copy_(there[: MiB // 2]),
    "added": _core.add_from,
    "owed": _core.copy_later,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_from_a_killed_device_is_never_read(two: shoal.Lease, name: str) -> None:
    """It may be there in part; whoever reads it is told so, however often, in whatever thread."""
    here = torch.ones(MiB, device="shoal:1")
    there = torch.ones(MiB, device="shoal:2")
    torch.shoal.synchronize()
    os.kill(two.worker_pids[1], signal.SIGSTOP)
    there.add_(1)  # it will never be done
    COPIES[name](here, there)
    os.kill(two.worker_pids[1], signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(shoal.DeviceLostError, match="lost"):
            here.sum().item()
    assert torch.ones(MiB, device="shoal:1").sum().item() == MiB


@pytest.mark.parametrize("goes", [False, True])
def test_an_owed_copy_of_a_killed_device_is_never_read(two: shoal.Lease, goes: bool) -> None:
    """Also if the source is let go after the loss, and its address may be another's."""
    here, there = torch.ones(MiB, device="shoal:1"), torch.ones(MiB, device="shoal:2")
    assert _core.copy_later(here, there)
    os.kill(two.worker_pids[1], signal.SIGKILL)
    with pytest.raises(shoal.DeviceLostError):
        there.sum().item()
    if goes:
        del there
    others = [torch.zeros(MiB, device="shoal:1") for _ in range(3)]
    for _ in range(3):
        with pytest.raises(shoal.DeviceLostError):
            here.sum().item()
    here.copy_(torch.zeros(MiB))  # all of it is new: nothing is owed any more
    assert here.sum().item() == others[0].sum().item() == 0


@pytest.mark.parametrize("goes", [False, True])
def test_a_killed_device_that_was_owed_a_copy_harms_nobody(goes: bool) -> None:
    device = "cpu,memory=64MiB,threads=1"
    with shoal.up([device] * 3) as pool, shoal.connect(pool.url, devices=3) as lease:
        source = torch.ones(MiB, device="shoal:1")
        targets = [torch.zeros(MiB, device=f"shoal:{i}") for i in (2, 3)]
        assert all(_core.copy_later(target, source) for target in targets)
        os.kill(lease.worker_pids[1], signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            torch.shoal.synchronize(2)
        if goes:
            del source
        else:
            source.add_(1)
            assert source.sum().item() == 2 * MiB
        assert targets[1].sum().item() == MiB
        with pytest.raises(shoal.DeviceLostError):
            targets[0].sum().item()


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_what_could_not_be_made_is_never_read(two: shoal.Lease, name: str) -> None:
    here = torch.ones(MiB, device="shoal:1")
    wrong = torch.ones(MiB, device="shoal:2").index_select(0, torch.full((MiB,), MiB).to("shoal:2"))
    COPIES[name](here, wrong)
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|failed to compute"):
            here.sum().item()


def test_a_copy_on_its_own_device_of_what_could_not_be_made_is_never_read(two: shoal.Lease) -> None:
    """The first device of the lease, by two of its names."""
    wrong = torch.ones(9, device="shoal").index_select(0, torch.tensor([9], device="shoal"))
    here = wrong.to("shoal:1")
    for _ in range(3):
        with pytest.raises(IndexError, match="out of range"):
            here.sum().item()
