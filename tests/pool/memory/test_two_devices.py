"""A lease of two devices, used by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal import _core
from tests.support.compare import close, same_bits


@pytest.fixture(autouse=True)
def lease(pool: shoal.Pool) -> Iterator[shoal.Lease]:
    with shoal.connect(pool.url, devices=2) as both:
        yield both


def test_both_are_there(lease: shoal.Lease) -> None:
    assert lease.devices == [torch.device("shoal", 1), torch.device("shoal", 2)]
    # The whole lease, which is device 0, and each of its members.
    assert torch.shoal.device_count() == torch.accelerator.device_count() == 3
    assert torch.shoal.get_device_properties(0).memory_bytes == (256 + 128) * 2**20
    assert [d.name for d in shoal.device_info()] == ["left", "right"]
    assert torch.shoal.get_device_name(2) == "right"
    assert len(set(lease.worker_pids)) == 2


def test_work_stays_where_it_is_put() -> None:
    x = torch.ones(5, device="shoal:2")
    y = (x * 2).cumsum(0)
    assert y.device == torch.device("shoal", 2)
    assert torch.ones(1, device="shoal").device.index == 0
    with torch.shoal.device(1):
        assert torch.ones(1, device="shoal").device.index == 1
        assert torch.shoal.current_device() == 1
    assert torch.shoal.current_device() == 0
    close(y, torch.tensor([2.0, 4, 6, 8, 10]))


@pytest.mark.parametrize("count", [0, 1, 100, 100_000, 3_000_000])
def test_copies_between_devices(count: int) -> None:
    x = torch.arange(float(count)).to("shoal:1")
    y = x.to("shoal:2")
    assert y.device.index == 2
    same_bits(y, x)
    z = torch.empty(count, device="shoal:1").copy_(y, non_blocking=True)
    same_bits(z, x)


def test_strided_and_converting_copies_between_devices() -> None:
    base = torch.arange(60.0).reshape(6, 10)
    x = base.to("shoal:1")
    same_bits(x.t()[::2].to("shoal:2"), base.t()[::2])
    same_bits(x[1:, 3].to("shoal:2", torch.int16), base[1:, 3].to(torch.int16))
    target = torch.zeros(6, 10, device="shoal:2")
    target[:, ::2].copy_(x[:, :5])
    expected = torch.zeros(6, 10)
    expected[:, ::2] = base[:, :5]
    same_bits(target, expected)


def test_tensors_of_two_devices_do_not_mix() -> None:
    a, b = torch.ones(3, device="shoal:1"), torch.ones(3, device="shoal:2")
    with pytest.raises(RuntimeError, match=r"shoal:1.*shoal:2|same device"):
        a + b


def test_lists_are_copied_between_devices_and_the_host() -> None:
    sources = [torch.randn(3, device="shoal:1"), torch.randn(4), torch.randn(5, device="shoal:2")]
    targets = [torch.zeros(3 + i, device="shoal:2") for i in range(3)]
    torch._foreach_copy_(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        same_bits(target, source.cpu())
    with pytest.raises(RuntimeError, match="length"):
        torch._foreach_copy_(targets, sources[:2])


def test_autograd_across_devices() -> None:
    w0 = torch.randn(4, 5, device="shoal:1", requires_grad=True)
    w1 = torch.randn(5, 2, device="shoal:2", requires_grad=True)
    x = torch.randn(3, 4)
    hidden = torch.tanh(x.to("shoal:1") @ w0)
    out = (hidden.to("shoal:2") @ w1).pow(2).sum()
    out.backward()
    l0, l1 = w0.detach().cpu().requires_grad_(), w1.detach().cpu().requires_grad_()
    (torch.tanh(x @ l0) @ l1).pow(2).sum().backward()
    assert w0.grad is not None
    assert w0.grad.device.index == 1
    close([w0.grad, w1.grad], [l0.grad, l1.grad], rtol=1e-4, atol=1e-5)


def test_each_device_has_its_own_random_numbers() -> None:
    torch.manual_seed(4)
    first = [torch.rand(3, device=f"shoal:{i}") for i in range(3)]
    torch.manual_seed(4)
    expected = torch.rand(3)
    for drawn in first:
        same_bits(drawn, expected)
    states = torch.shoal.get_rng_state_all()
    assert len(states) == 3
    torch.rand(5, device="shoal:2")
    torch.shoal.set_rng_state_all(states)
    whole, left, right = [torch.rand(3, device=f"shoal:{i}") for i in range(3)]
    same_bits(whole, left)
    same_bits(left, right)


def test_figures_are_kept_by_device() -> None:
    before = [torch.shoal.memory_allocated(i) for i in range(3)]
    kept = torch.ones(1000, device="shoal:2")
    after = [torch.shoal.memory_allocated(i) for i in range(3)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [kept.nbytes, 0, kept.nbytes]
    assert torch.shoal.mem_get_info(2)[1] == 128 * 2**20
    torch.shoal.synchronize(2)
    torch.shoal.synchronize("shoal:1")


def test_an_error_belongs_to_its_device() -> None:
    index = torch.tensor([9], device="shoal:2")
    torch.nn.functional.embedding(index, torch.ones(2, 2, device="shoal:2"))
    torch.shoal.synchronize(1)
    with pytest.raises(IndexError, match="right"):
        torch.shoal.synchronize(2)


def test_a_device_beyond_the_lease_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="shoal:3 does not exist"):
        torch.ones(1, device="shoal:3")


def test_a_new_lease_starts_at_its_first_device(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url, devices=2):
        torch.shoal.set_device(2)
        assert torch.ones(1, device="shoal").device.index == 2
    with shoal.connect(pool.url, devices=1):
        assert torch.ones(1, device="shoal").device.index == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 1000, 300_001])
def test_what_lies_elsewhere_is_added_without_a_copy(dtype: torch.dtype, count: int) -> None:
    x, y = torch.randn(count + 8).to(dtype), torch.randn(count + 8).to(dtype)
    target, source = x.to("shoal:1"), y.to("shoal:2")
    used = torch.accelerator.max_memory_allocated("shoal:1")
    assert _core.add_from(target[3 : count + 3], source[5 : count + 5])
    source.zero_()  # comes after it was read
    x[3 : count + 3] += y[5 : count + 5]
    same_bits(target, x)
    assert torch.accelerator.max_memory_allocated("shoal:1") == used


def test_other_sums_need_a_copy() -> None:
    target, source = torch.zeros(4, 6, device="shoal:1"), torch.ones(4, 6, device="shoal:2")
    assert not _core.add_from(target, target)
    assert not _core.add_from(target, source[:3])
    assert not _core.add_from(target.t(), source.t())
    assert not _core.add_from(target.int(), source.int())
    assert not _core.add_from(target, torch.ones(4, 6))
    assert not _core.add_from(target, source.double())
    same_bits(target, torch.zeros(4, 6))
