"""Programs that name no memory share a device: each grows while others leave it room, and is paged
out, never failed, when they come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.pool.client.head_connection import ask
from shoal.pool.wire import messages
from tests.support import programs
from tests.support.one_device import OneDevice
from tests.support.waiting import wait_until

MiB = 2**20
DEVICE = 256 * MiB
FLOOR = 64 * MiB

#: Multiplies its way through tensors that take most of the device, and checks every value.
WORK = """
import sys, torch, shoal
shoal.connect()
rounds, count = int(sys.argv[1]), int(sys.argv[2])
MiB = 2**20
tensors = [torch.full((4 * MiB,), float(i), device="shoal") for i in range(count)]  # 16 MiB each
print("ready", flush=True)
for step in range(rounds):
    for tensor in tensors:
        tensor += 1
for i, tensor in enumerate(tensors):
    low, high = tensor.aminmax()
    assert low.item() == high.item() == i + rounds, (i, low.item(), high.item())
print("right", flush=True)
"""


@pytest.fixture
def device() -> Iterator[OneDevice]:
    spec = f"cpu,memory={DEVICE},host={2 * DEVICE},disk=0,threads=1"
    with OneDevice(spec, lambda _: (FLOOR, DEVICE)) as device:
        yield device


def state_of(device: OneDevice, session: int) -> str:
    profile = device.profiles.get(session)
    return profile.state if profile is not None else ""


def test_one_program_has_the_whole_device(device: OneDevice) -> None:
    out = programs.succeed(WORK, "2", "14", SHOAL_POOL=device.url)
    assert out.split() == ["ready", "right"]
    wait_until(lambda: 1 in device.profiles, 30, "the device server told of the session")
    profile = device.profiles[1]
    assert profile.limit_bytes == DEVICE
    assert profile.away_bytes == 0


def test_two_programs_share_the_device_and_finish(device: OneDevice) -> None:
    """Each needs 224 of 256 MiB."""
    both = [programs.start(WORK, "12", "14", SHOAL_POOL=device.url) for _ in range(2)]
    for one in both:
        out, err = one.communicate(timeout=100)
        assert (one.returncode, out.split()) == (0, ["ready", "right"]), err


def test_a_newcomer_gets_its_floor_from_a_program_that_is_idle(device: OneDevice) -> None:
    idle = """
    import sys, torch, shoal
    shoal.connect()
    held = [torch.full((4 * 2**20,), float(i), device="shoal") for i in range(15)]
    held[0].sum().item()
    print("ready", flush=True)
    sys.stdin.readline()
    print(sum(t[-1].item() for t in held), flush=True)
    """
    first = programs.start(idle, SHOAL_POOL=device.url)
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "ready\n"
    programs.succeed(WORK, "2", "8", SHOAL_POOL=device.url)
    wait_until(lambda: device.profiles[1].away_bytes > 0, 10, "the first one shrank")
    out, err = first.communicate("go\n", timeout=60)
    assert (first.returncode, out) == (0, f"{float(sum(range(15)))}\n"), err


def test_a_call_that_needs_more_than_its_part_gets_it(device: OneDevice) -> None:
    """One operator on 192 MiB, while another program holds as much: they take turns."""
    work = """
    import torch, shoal
    shoal.connect()
    for step in range(6):
        left = torch.full((16 * 2**20,), 1.0, device="shoal")
        total = left + torch.full((16 * 2**20,), 2.0, device="shoal")
        assert total.sum().item() == 3 * 16 * 2**20
        del left, total
    print("right")
    """
    both = [programs.start(work, SHOAL_POOL=device.url) for _ in range(2)]
    for one in both:
        out, err = one.communicate(timeout=100)
        assert (one.returncode, out) == (0, "right\n"), err


def test_memory_that_is_booked_stays_booked() -> None:
    """A call that needs what a fixed lease has booked is refused, as on a device that is full."""
    grow = """
    import sys, torch, shoal
    shoal.connect()
    if len(sys.argv) == 1:
        try:
            torch.ones(18 * 2**20, device="shoal").sum().item()
        except torch.OutOfMemoryError as error:
            print("refused", "56 MiB are in use" in str(error), flush=True)
    else:
        print(torch.ones(3, device="shoal").sum().item(), flush=True)
        sys.stdin.readline()
    """
    booked = {1: (200 * MiB, 0), 2: (56 * MiB, DEVICE)}
    spec = f"cpu,memory={DEVICE},host={DEVICE},disk=0,threads=1"
    with OneDevice(spec, lambda session: booked[session]) as device:
        fixed = programs.start(grow, "holds", SHOAL_POOL=device.url)
        assert fixed.stdout is not None
        assert fixed.stdout.readline() == "3.0\n"
        assert programs.succeed(grow, SHOAL_POOL=device.url) == "refused True\n"
        fixed.communicate("go\n", timeout=30)


def test_a_suspended_sessions_memory_goes_to_others(device: OneDevice) -> None:
    idle = """
    import sys, torch, shoal
    shoal.connect()
    held = [torch.full((4 * 2**20,), float(i), device="shoal") for i in range(10)]  # 16 MiB each
    print(held[0].sum().item(), flush=True)
    sys.stdin.readline()
    print([t.max().item() == t.min().item() == i for i, t in enumerate(held)].count(True))
    """
    first = programs.start(idle, SHOAL_POOL=device.url)
    assert first.stdout is not None
    assert first.stdout.readline() == "0.0\n"
    device.order(1, suspend=True)
    wait_until(lambda: state_of(device, 1) == "suspended", 30, "the first one is suspended")
    assert device.profiles[1].used_bytes < MiB
    out = programs.succeed(WORK, "2", "15", SHOAL_POOL=device.url)  # 240 of 256 MiB, in place
    assert out.split() == ["ready", "right"]
    wait_until(lambda: 2 in device.profiles, 30, "the device server told of the second one")
    assert device.profiles[2].away_bytes == 0
    device.order(1, suspend=False)
    out, err = first.communicate("go\n", timeout=60)
    assert (first.returncode, out) == (0, "10\n"), err


# --- in a pool -------------------------------------------------------------------------------------


def test_two_programs_of_a_pool_that_name_no_memory_share_its_device() -> None:
    """Each needs 224 of 256 MiB, and both finish."""
    with shoal.up([f"cpu,memory={DEVICE},host={2 * DEVICE},disk=0,threads=1"]) as pool:
        both = [programs.start(WORK, "6", "14", SHOAL_POOL=pool.url) for _ in range(2)]
        for one in both:
            out, err = one.communicate(timeout=100)
            assert (one.returncode, out.split()) == (0, ["ready", "right"]), err


def test_a_lease_with_an_amount_comes_beside_one_without() -> None:
    with (
        shoal.up([f"cpu,memory={DEVICE},host={DEVICE},disk=0,threads=1"]) as pool,
        shoal.connect(pool.url),
    ):
        assert pool.devices[0].free_bytes == DEVICE - FLOOR
        with pytest.raises(shoal.LeaseError, match="193 MiB free"):
            ask(pool.url, messages.AskLease(1, 193 * MiB, []))
        programs.succeed(
            "import shoal; shoal.connect(memory='192MiB'); print('ok')", SHOAL_POOL=pool.url
        )


def test_a_tensor_is_shared_out_of_what_is_booked() -> None:
    """It cannot be paged out, so what others may need is not shared."""
    with (
        shoal.up([f"cpu,memory={DEVICE},host={DEVICE},disk=0,threads=1"]) as pool,
        shoal.connect(pool.url),
    ):
        with pytest.raises(shoal.ShareError, match=f"lease that booked {FLOOR} bytes"):
            shoal.share(torch.ones(FLOOR // 4 + 1024, device="shoal"))
        shoal.share(torch.ones(FLOOR // 8, device="shoal"))


def test_a_device_without_swap_space_is_booked_whole() -> None:
    """Nothing could be paged out of it when others come."""
    with (
        shoal.up([f"cpu,memory={DEVICE},host=0,disk=0,threads=1"]) as pool,
        shoal.connect(pool.url),
    ):
        assert pool.devices[0].free_bytes == 0
