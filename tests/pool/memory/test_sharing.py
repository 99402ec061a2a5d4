"""Memory that two programs share: the same bytes, one writer at a time, and an end with its owner."""

from __future__ import annotations

import gc
import os
import random
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.device import leases
from tests.support import processes, programs
from tests.support.partner import Partner, PartnerError
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    with shoal.up(
        [
            "cpu,memory=256MiB,host=0,disk=0,threads=1,name=left",
            "cpu,memory=256MiB,host=0,disk=0,threads=1,name=right",
        ]
    ) as made:
        yield made


@pytest.fixture(scope="module")
def partner(pool: shoal.Pool) -> Iterator[Partner]:
    """The other program. Its lease is on one device, ours may be on another."""
    with Partner(SHOAL_POOL=pool.url) as other:
        other('lease = shoal.connect(memory="64MiB")')
        yield other


@pytest.fixture(autouse=True)
def lease(pool: shoal.Pool, partner: Partner) -> Iterator[shoal.Lease]:
    """Ours. Afterwards neither program has anything open, and the other one is well."""
    with shoal.connect(pool.url, memory="64MiB") as made:
        yield made
        partner("t = None")
        assert partner('torch.ones(3, device="shoal").sum().item()') == 3
        gc.collect()
        for shared in session_parts(made) if made.active else ():
            shoal.unshare(shared)
        wait_until(lambda: not shoal.shares(), 30, "nothing is shared any more")
    wait_until(lambda: not shared_files(pool), 30, "no memory is left")


def session_parts(made: shoal.Lease) -> list[torch.Tensor]:
    from shoal.device import sharing

    return [p.owned for p in sharing._parts.get(made, []) if p.owned is not None]


def shared_files(pool: shoal.Pool) -> list[str]:
    """Where processes of the pool, or we, still have shared memory mapped or open."""
    found = []
    for pid in (os.getpid(), *processes.pool_pids(pool.url)):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            found += [f"{pid} maps {line}" for line in maps.splitlines() if "shoal-share" in line]
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(fd)
                found += [f"{pid} has {target}"] if "shoal-share" in target else []
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def inodes(pid: int) -> set[str]:
    """The shared memories that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:shoal-share (" in line}


# --- for reading --------------------------------


def test_the_other_program_reads_the_same_memory(lease: shoal.Lease, partner: Partner) -> None:
    ours = torch.arange(2 * MiB, dtype=torch.float32, device="shoal")
    total = ours.double().sum().item()
    handle = shoal.share(ours)
    before = partner(f"t = shoal.open({str(handle)!r}); torch.shoal.traffic()")
    assert partner("torch.shoal.traffic()") is not None
    assert partner("[str(t.device), list(t.shape), str(t.dtype)]") == [
        "shoal:0", [2 * MiB], "torch.float32",
    ]  # fmt: skip
    before = partner("torch.shoal.traffic()")
    assert partner("t.double().sum().item()") == total
    after = partner("torch.shoal.traffic()")
    for name in ("bytes_in", "bytes_out", "bytes_copied_by_client", "bytes_peer"):
        assert after[name] - before[name] <= 8, name  # but for the sum itself
    # Not equal bytes: the same pages.
    (theirs,) = partner("lease.worker_pids")
    assert inodes(theirs) == inodes(lease.worker_pids[0]) != set()
    assert ours.double().sum().item() == total
    assert torch.equal(ours.cpu(), torch.arange(2 * MiB, dtype=torch.float32))
    assert partner("t[-1].item()") == 2 * MiB - 1
    assert partner("t.cpu()[12345].item()") == 12345


def test_nobody_writes_what_is_shared_for_reading(partner: Partner) -> None:
    ours = torch.ones(100, device="shoal")
    handle = shoal.share(ours)
    partner(f"t = shoal.open({str(handle)!r})")
    for statement in ("t.add_(1)", "t.zero_()", "t[3] = 7.0", "t.copy_(torch.zeros(100))"):
        with pytest.raises(PartnerError, match="clone") as refused:
            partner(f"{statement}; torch.shoal.synchronize()")
        assert refused.value.kind == "ShareError"
    with pytest.raises(shoal.ShareError, match="nobody writes"):
        ours.mul_(2).sum().item()
    assert partner("t.sum().item()") == 100
    assert partner("(t.clone() + 1).sum().item()") == 200
    assert ours.sum().item() == 100


@pytest.mark.parametrize(
    "view",
    ["base", "base[1:, ::2]", "base.T", "base[3]", "base[2, 5]", "base.expand(2, 8, 12)"],
)
def test_views_are_opened_as_they_are(view: str, partner: Partner) -> None:
    base = torch.arange(96.0).reshape(8, 12)
    expected = eval(view, {"base": base})
    ours = eval(view, {"base": base.to("shoal")})
    partner(f"t = shoal.open({str(shoal.share(ours))!r})")
    assert partner("[list(t.shape), list(t.stride()), t.storage_offset()]") == [
        list(expected.shape), list(expected.stride()), expected.storage_offset(),
    ]  # fmt: skip
    assert partner("t.tolist()") == expected.tolist()
    assert partner("t.requires_grad") is False


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "bool", "complex64", "float64"])
def test_dtypes(dtype: str, partner: Partner) -> None:
    ours = torch.tensor([0, 1, 2, 3]).to(getattr(torch, dtype)).to("shoal")
    partner(f"t = shoal.open({str(shoal.share(ours))!r})")
    assert partner("str(t.dtype)") == f"torch.{dtype}"
    assert partner("(t != 0).tolist()") == [False, True, True, True]


def test_weights_of_a_model_serve_two_programs(partner: Partner) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).to("shoal")
    handles = {name: str(shoal.share(p)) for name, p in model.named_parameters()}
    partner(
        "m = torch.nn.Linear(16, 4, device='meta')\n"
        f"m.load_state_dict({{n: shoal.open(h) for n, h in {handles!r}.items()}}, assign=True)"
    )
    x = torch.randn(3, 16)
    theirs = partner(f"m(torch.tensor({x.tolist()}, device='shoal')).tolist()")
    assert torch.equal(torch.tensor(theirs), model(x.to("shoal")).detach().cpu())
    loss = model(x.to("shoal")).sum()
    loss.backward()  # reading is all that it takes
    assert model.weight.grad is not None
    partner("m = None")


# --- one at a time --------------------------------


def test_exclusive_memory_goes_back_and_forth(partner: Partner) -> None:
    ours = torch.zeros(1000, device="shoal")
    handle = shoal.share(ours, mode="exclusive")
    ours += 1  # who shares it has it first
    partner(f"h = {str(handle)!r}; t = shoal.open(h)")
    with pytest.raises(PartnerError, match="another program holds it"):
        partner("t.sum().item()")
    expected = 1.0
    shoal.release(handle)
    with pytest.raises(shoal.ShareError, match="acquire"):
        ours.sum().item()
    for turn in range(5):
        assert partner("with shoal.acquire(t):\n    t.mul_(2)\n    s = t.sum().item()") is None
        expected *= 2
        assert partner("s") == 1000 * expected
        with shoal.acquire(ours):
            assert ours.sum().item() == 1000 * expected
            ours.add_(turn)
            expected += turn
    with pytest.raises(PartnerError, match="this program does not hold it"):
        partner("t.add_(1); torch.shoal.synchronize()")
    with shoal.acquire(handle):
        assert ours.tolist() == [expected] * 1000


def test_whole_uploads_stay_in_the_shared_memory(partner: Partner) -> None:
    ours = torch.zeros(64 * 1024, device="shoal")
    with shoal.share(ours, mode="exclusive") as handle:
        ours.copy_(torch.arange(64 * 1024.0))
        shoal.release(ours)
        partner(f"t = shoal.open({str(handle)!r})")
        partner("with shoal.acquire(t): s = t[-1].item(); t.copy_(torch.ones(64 * 1024))")
        assert partner("s") == 64 * 1024 - 1
        with shoal.acquire(handle):
            assert ours.sum().item() == 64 * 1024


def test_who_waits_gets_it_or_is_told(partner: Partner) -> None:
    ours = torch.zeros(8, device="shoal")
    handle = shoal.share(ours, mode="exclusive")
    partner(f"t = shoal.open({str(handle)!r})")
    with pytest.raises(PartnerError, match=r"held this memory for 0.1 s.*timeout_s"):
        partner("shoal.acquire(t, timeout_s=0.1)")
    partner.send("a = shoal.acquire(t)")  # it waits, and it is its turn next
    assert ours.add_(1).sum().item() == 8
    assert partner.busy()
    shoal.release(handle)
    assert partner.receive() is None
    assert partner("t.sum().item()") == 8
    (listed,) = shoal.shares()
    assert (listed.holder_pid, listed.owner_pid) == (partner.pid, os.getpid())
    partner("shoal.release(t)")
    assert shoal.shares()[0].holder_pid == 0
    with pytest.raises(shoal.ShareError, match="shared for reading"):
        shoal.acquire(shoal.share(torch.ones(3, device="shoal")))


# --- taking back, and letting go --------------------------------


@pytest.mark.parametrize("mode", ["read", "exclusive"])
def test_what_is_taken_back_is_gone_for_others_and_stays_ours(mode: str, partner: Partner) -> None:
    ours = torch.arange(5000.0, device="shoal")
    with shoal.share(ours, mode=mode) as handle:  # type: ignore[arg-type]
        partner(f"t = shoal.open({str(handle)!r}); u = torch.ones(5000, device='shoal')")
    for statement in ("t.sum().item()", "t.tolist()", "(t + u).sum().item()", "t.cpu()"):
        with pytest.raises(PartnerError, match="taken back") as gone:
            partner(statement)
        assert gone.value.kind == "ShareRevokedError"
    assert partner("u.sum().item()") == 5000
    ours += 1
    assert ours.tolist() == [float(i + 1) for i in range(5000)]
    with pytest.raises(PartnerError, match="no such shared memory"):
        partner(f"shoal.open({str(handle)!r})")
    with pytest.raises(shoal.ShareError, match="does not share"):
        shoal.unshare(handle)
    again = shoal.share(ours)  # it can be shared anew, under another name
    assert again != handle
    partner(f"t = shoal.open({str(again)!r})")
    assert partner("t[0].item()") == 1


def test_the_directory_tells_who_has_what(lease: shoal.Lease, partner: Partner) -> None:
    ours = torch.zeros(3, 5, device="shoal")
    handle = shoal.share(ours)
    (listed,) = shoal.shares()
    assert listed.bytes == 60
    assert listed.mode == "read"
    assert listed.owner_pid == os.getpid()
    assert listed.epoch == lease.epoch
    assert (listed.dtype, listed.sizes, listed.readers) == ("float32", [3, 5], [])
    partner(f"t = shoal.open({str(handle)!r}); v = shoal.open({str(handle)!r})")
    assert shoal.shares()[0].readers == [partner.pid] * 2
    assert partner("len(shoal.shares())") == 1
    partner("del v")
    partner("torch.shoal.synchronize()")
    wait_until(lambda: shoal.shares()[0].readers == [partner.pid], 30, "one of them is closed")
    del ours
    gc.collect()
    assert partner("t.sum().item()") == 0  # a shared tensor lives until it is taken back
    shoal.unshare(handle)
    assert shoal.shares() == []


def test_a_lease_that_ends_takes_its_memory_along(pool: shoal.Pool, partner: Partner) -> None:
    ours = torch.ones(4, device="shoal")
    partner(f"t = shoal.open({str(shoal.share(ours))!r})")
    assert partner("t.sum().item()") == 4
    shoal.connect(pool.url, memory="32MiB")

    def revoked() -> bool:
        try:
            partner("t.sum().item()")
        except PartnerError as error:
            return error.kind == "ShareRevokedError"
        return False

    wait_until(revoked, 8, "the other program is told")


# --- several devices as one --------------------------------


def test_shared_memory_of_a_lease_of_two_devices(pool: shoal.Pool, partner: Partner) -> None:
    partner('lease = shoal.connect(memory="64MiB", devices=2)')
    with shoal.connect(pool.url, devices=2, memory="64MiB"):
        on_second = torch.arange(1000.0, device="shoal:2")
        whole = torch.arange(2 * MiB, dtype=torch.float32).to("shoal")
        fillers = [torch.full((2 * MiB,), float(i), device="shoal") for i in range(9)]
        handle, second = shoal.share(whole, mode="exclusive"), shoal.share(on_second)
        for filler in fillers:  # some of them are on the other device
            whole += filler
        assert whole[5].item() == 5 + sum(range(9))
        assert on_second.to("shoal").sum().item() == on_second.sum().item() == 499500
        assert on_second.to("shoal:1").sum().item() == 499500
        copied = whole.to("shoal:2")
        shoal.release(handle)
        partner(f"t = shoal.open({str(handle)!r}); v = shoal.open({str(second)!r})")
        assert partner("v.sum().item()") == 499500
        assert partner("with shoal.acquire(t): s = (t * 2 + v[7])[5].item()") is None
        assert partner("s") == 2 * (5 + sum(range(9))) + 7
        assert copied[5].item() == 5 + sum(range(9))
        partner("t = v = None")
        shoal.unshare(handle)
        assert whole[5].item() == 5 + sum(range(9))
        entries = {s.address: s for s in shoal.memory.map()}
        assert entries[on_second.data_ptr()].swapped == ()
    partner('lease = shoal.connect(memory="64MiB")')


# --- what is refused --------------------------------


def test_what_cannot_be_shared_says_why(pool: shoal.Pool) -> None:
    with pytest.raises(shoal.ShareError, match=r'to\("shoal"\)'):
        shoal.share(torch.ones(3))
    with pytest.raises(shoal.ShareError, match="no memory"):
        shoal.share(torch.ones(0, device="shoal"))
    with pytest.raises(ValueError, match="exclusive"):
        shoal.share(torch.ones(3, device="shoal"), mode="write")  # type: ignore[arg-type]
    with pytest.raises(shoal.ShareError, match="resolve_conj"):
        shoal.share(torch.ones(3, dtype=torch.complex64, device="shoal").conj())
    shared = torch.ones(3, device="shoal")
    handle = shoal.share(shared)
    with pytest.raises(shoal.ShareError, match="already"):
        shoal.share(shared[1:])
    assert shoal.open(handle).sum().item() == 3  # its own program may open it, too
    assert len(shoal.shares()) == 1
    assert "…" in repr(handle)
    assert handle.split(":")[-1] not in repr(handle)
    with shoal.connect(pool.url, devices=2, memory="32MiB"):
        with pytest.raises(shoal.ShareError, match="it is sharded and cannot be shared"):
            shoal.share(torch.zeros(5 * MiB, dtype=torch.float32, device="shoal"))
        with pytest.raises(shoal.ShareError, match="stay in the device's memory"):
            shoal.share(torch.zeros(10 * MiB, dtype=torch.float32, device="shoal"))
        with pytest.raises(shoal.ShareError, match="no such shared memory"):
            shoal.open(handle)  # the lease that shared it is over


def test_a_thousand_wrong_handles_open_nothing(partner: Partner) -> None:
    handle = shoal.share(torch.ones(3, device="shoal"))
    start, place, share, secret = str(handle).rsplit(":", 3)
    dice = random.Random(4)
    for i in range(1000):
        wrong = dice.randbytes(24).hex() if i % 2 else _changed(secret, dice)
        known = share if i % 3 else dice.randbytes(8).hex()
        with pytest.raises(shoal.ShareError, match="no such shared memory"):
            shoal.open(f"{start}:{place}:{known}:{wrong}")
    other = secrets.token_hex(8)
    with pytest.raises(shoal.ShareError, match="Lease a device there"):
        shoal.open(f"{start}:{other}:{share}:{secret}")
    for text in ("", "x", str(handle)[:-1], str(handle) + "0", f"{start}:../x:{share}:{secret}!"):
        with pytest.raises(shoal.ShareError, match="not a handle"):
            shoal.open(text)
    assert shoal.shares()[0].readers == []
    partner(f"t = shoal.open({str(handle)!r})")
    assert partner("t.sum().item()") == 3


def _changed(secret: str, dice: random.Random) -> str:
    """The secret with one of its bits turned."""
    bit = 1 << dice.randrange(len(secret) * 4)
    return f"{int(secret, 16) ^ bit:0{len(secret)}x}"


def test_a_program_without_a_lease_gets_one(pool: shoal.Pool) -> None:
    handle = shoal.share(torch.full((4,), 2.5, device="shoal"))
    with Partner() as stranger:  # no SHOAL_POOL: the handle says where
        assert stranger(f"shoal.open({str(handle)!r}).tolist()") == [2.5] * 4
        assert stranger("leases.current().url") == pool.url


def test_the_example_of_the_docs_runs() -> None:
    text = (programs.ROOT / "docs" / "memory.md").read_text()
    (example,) = [e for e in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "READER" in e]
    assert programs.succeed(example).split() == ["64000.0"]


def test_no_room_is_an_error_that_leaves_all_well(pool: shoal.Pool, partner: Partner) -> None:
    big = torch.ones(10 * MiB, dtype=torch.float32, device="shoal")
    handle = shoal.share(big)
    partner('v = torch.ones(8 * 2**20, device="shoal")')
    with pytest.raises(PartnerError, match="memory") as full:
        partner(f"t = shoal.open({str(handle)!r})")
    assert full.value.kind == "OutOfMemoryError"
    assert shoal.shares()[0].readers == []
    partner("v = None")
    partner(f"t = shoal.open({str(handle)!r})")
    assert partner("t.sum().item()") == 10 * MiB
    assert torch.ones(5 * MiB, dtype=torch.float32, device="shoal").sum().item() == 5 * MiB


def test_everything_ends_with_the_programs(pool: shoal.Pool) -> None:
    """A dozen shares and openers, killed at random moments."""
    ours = [torch.full((1000,), float(i), device="shoal") for i in range(6)]
    handles = [str(shoal.share(t, mode="exclusive" if i % 2 else "read"))
               for i, t in enumerate(ours)]  # fmt: skip
    with Partner(SHOAL_POOL=pool.url) as doomed:
        doomed(f'lease = shoal.connect(memory="32MiB"); ts = [shoal.open(h) for h in {handles}]')
        shoal.release(handles[1])
        doomed("a = shoal.acquire(ts[1])")
        doomed("mine = torch.ones(10, device='shoal')")
        theirs = shoal.open(doomed("str(shoal.share(mine))"))
        assert theirs.sum().item() == 10
        assert shoal.shares()[1].holder_pid == doomed.pid
        doomed.kill()
    with shoal.acquire(ours[1], timeout_s=5):  # the holder died, and thereby let go
        assert ours[1].sum().item() == 1000

    def revoked() -> bool:
        try:
            theirs.sum().item()
        except shoal.ShareRevokedError:
            return True
        return False

    wait_until(revoked, 8, "the dead program's memory is taken back")
    wait_until(lambda: not any(s.readers for s in shoal.shares()), 30, "no dead reader is listed")
    assert leases.current() is not None
