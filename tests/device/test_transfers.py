"""Bytes between host and device: any layout, dtype and size, and no more of them than needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compare import same_bits

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
MiB = 2**20


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes that are all different from their neighbours, whatever the dtype."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64)) * size
    raw = (torch.arange(count, dtype=torch.int64) * 7 + 3) % 251
    if dtype == torch.bool:
        raw = raw % 2
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    """A base shape and view operations that fit it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    current, steps = torch.empty(shape, device="meta"), []
    for _ in range(draw(st.integers(0, 3))):
        dims = current.dim()
        choice = draw(st.sampled_from(["permute", "slice", "select", "unsqueeze", "expand"]))
        step: tuple[int, ...]
        if choice == "permute" and dims:
            step = tuple(draw(st.permutations(range(dims))))
        elif choice == "slice" and dims:
            dim = draw(st.integers(0, dims - 1))
            step = (dim, draw(st.integers(0, 2)), draw(st.integers(2, 5)), draw(st.integers(1, 3)))
        elif choice == "select" and dims and 0 not in current.shape:
            dim = draw(st.integers(0, dims - 1))
            step = (dim, draw(st.integers(0, current.shape[dim] - 1)))
        elif choice == "expand":
            step = (draw(st.integers(1, 3)),)
        else:
            choice, step = "unsqueeze", (draw(st.integers(0, dims)),)
        steps.append((choice, step))
        current = apply(current, steps[-1:])
    return shape, steps


def apply(tensor: torch.Tensor, steps: list[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
    for name, step in steps:
        if name == "permute":
            tensor = tensor.permute(step)
        elif name == "slice":
            dim, start, end, stride = step
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(start, end, stride)
            tensor = tensor[tuple(index)]
        elif name == "select":
            tensor = tensor.select(*step)
        elif name == "expand":
            tensor = tensor.expand(*step, *tensor.shape)
        else:
            tensor = tensor.unsqueeze(*step)
    return tensor


@settings(max_examples=60)
@given(layouts(), st.sampled_from(DTYPES))
def test_any_layout_and_dtype_goes_there_and_back(
    layout: tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]], dtype: torch.dtype
) -> None:
    shape, steps = layout
    base = filled(shape, dtype)
    view = apply(base, steps)
    same_bits(view.to("shoal"), view)  # a view goes up
    same_bits(apply(base.to("shoal"), steps), view)  # a view comes down


@settings(max_examples=40)
@given(layouts(), st.sampled_from([torch.float32, torch.int16, torch.bool]))
def test_writing_into_any_view_changes_just_its_elements(
    layout: tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]], dtype: torch.dtype
) -> None:
    shape, steps = layout
    steps = [s for s in steps if s[0] != "expand"]  # torch refuses to write to overlapping memory
    try:
        local = apply(filled(shape, dtype), steps)
    except (IndexError, RuntimeError):
        return  # without the expansion a later step does not fit
    base, remote = filled(shape, dtype), filled(shape, dtype).to("shoal")
    source = torch.ones(local.shape, dtype=dtype)
    apply(base, steps).copy_(source)
    apply(remote, steps).copy_(source)
    same_bits(remote, base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 4097, 70_001])
def test_sizes_around_every_threshold(dtype: torch.dtype, count: int) -> None:
    source = filled((count,), dtype)
    same_bits(source.to("shoal"), source)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("offset", [0, 3])
def test_more_than_64_mib(pinned: bool, offset: int) -> None:
    source = torch.arange(21 * MiB, dtype=torch.float32)
    if pinned:
        source = source.pin_memory()
    remote = source[offset:].to("shoal")
    back = torch.empty(remote.shape, pin_memory=pinned)
    back.copy_(remote)
    assert torch.equal(back, source[offset:])


@pytest.mark.slow
def test_a_tensor_of_several_address_slots() -> None:
    source = torch.zeros(1300 * MiB, dtype=torch.uint8)
    source[[0, 1024 * MiB - 1, 1024 * MiB, -1]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    remote = source.to("shoal")
    assert remote[1024 * MiB - 1 : 1024 * MiB + 1].tolist() == [2, 3]
    assert remote.count_nonzero().item() == 4  # a sum would need eight times the memory
    assert torch.equal(remote.cpu(), source)


def test_overlapping_elements_of_a_source_are_each_sent() -> None:
    base = torch.arange(20.0)
    windows = base.as_strided((6, 5), (2, 1), 3)
    same_bits(windows.to("shoal"), windows)
    same_bits(base.to("shoal").as_strided((6, 5), (2, 1), 3), windows)
    same_bits(base.to("shoal").unfold(0, 5, 2), base.unfold(0, 5, 2))


def test_conversion_on_the_way() -> None:
    source = torch.tensor([1.5, -2.5, 300.25])
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.complex64):
        same_bits(source.to("shoal", dtype), source.to(dtype))
        same_bits(source.to("shoal").to("cpu", dtype), source.to(dtype))


def test_lazy_bits_are_resolved_on_the_way() -> None:
    source = torch.tensor([1 + 2j, 3 - 4j])
    for view in (source.conj(), source.conj().imag, -source.imag):
        same_bits(view.to("shoal"), view.resolve_conj().resolve_neg())
        remote = source.to("shoal")
        moved = remote.conj().imag if not view.is_complex() and view.is_neg() else None
        if moved is not None:
            same_bits(moved.cpu().resolve_neg(), view.resolve_neg())
    same_bits(source.to("shoal").conj().cpu().resolve_conj(), source.conj().resolve_conj())


def test_a_pageable_source_may_change_right_after_a_non_blocking_upload() -> None:
    for count in (100, MiB):
        source = torch.ones(count)
        remote = source.to("shoal", non_blocking=True)
        source.fill_(9)
        assert remote.min().item() == remote.max().item() == 1


def test_a_pinned_source_may_be_dropped_right_after_a_non_blocking_upload() -> None:
    remotes = []
    for value in range(8):
        source = torch.full((MiB,), float(value), pin_memory=True)
        remotes.append(source.to("shoal", non_blocking=True))
        del source  # its memory must not be given to the next one before it was read
    assert [r.sum().item() for r in remotes] == [float(v * MiB) for v in range(8)]


def test_a_pinned_download_is_there_after_synchronize() -> None:
    remote = torch.arange(float(MiB), device="shoal")
    back = torch.zeros(MiB, pin_memory=True)
    back.copy_(remote, non_blocking=True)
    torch.shoal.synchronize()
    assert torch.equal(back, torch.arange(float(MiB)))


def test_pinned_memory_is_known_as_such() -> None:
    plain = torch.ones(1000)
    assert not plain.is_pinned()
    pinned = plain.pin_memory()
    assert pinned.is_pinned()
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned, plain)
    assert torch.empty(10, pin_memory=True).is_pinned()


# --- how many bytes move --------------------------------


def counted(name: str) -> int:
    return torch.shoal.traffic()[name]


def test_item_of_one_element_moves_its_eight_bytes() -> None:
    big = torch.arange(8 * MiB, dtype=torch.float64, device="shoal")  # 64 MiB
    torch.shoal.synchronize()
    before = counted("bytes_out")
    assert big[1_234_567].item() == 1_234_567.0
    assert counted("bytes_out") - before == 8


def test_a_slice_moves_only_itself() -> None:
    big = torch.arange(4 * MiB, dtype=torch.float32, device="shoal")
    before = counted("bytes_out")
    assert big[100:200].tolist() == [float(i) for i in range(100, 200)]
    assert counted("bytes_out") - before == 400


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_pinned_upload_is_not_copied_by_the_client(non_blocking: bool) -> None:
    source = torch.arange(float(MiB)).pin_memory()
    before = torch.shoal.traffic()
    remote = source.to("shoal", non_blocking=non_blocking)
    torch.shoal.synchronize()
    after = torch.shoal.traffic()
    assert after["bytes_in"] - before["bytes_in"] == source.nbytes
    assert after["bytes_copied_by_client"] == before["bytes_copied_by_client"]
    assert torch.equal(remote.cpu(), source)


def test_a_pageable_upload_is_copied_once() -> None:
    source = torch.arange(float(MiB // 2))
    before = counted("bytes_copied_by_client")
    source.to("shoal")
    assert counted("bytes_copied_by_client") - before == source.nbytes


def test_metadata_moves_nothing() -> None:
    remote = torch.ones(1000, 1000, device="shoal")
    torch.shoal.synchronize()
    before = torch.shoal.traffic()
    remote.t().reshape(10, 100, 1000)[3].shape  # noqa: B018
    torch.empty(5, device="shoal")
    after = torch.shoal.traffic()
    assert after["bytes_out"] == before["bytes_out"]
    assert after["round_trips"] == before["round_trips"]


def test_operators_do_not_wait() -> None:
    x = torch.ones(100, 100, device="shoal")
    (x @ x + 1).relu_()  # prepares the calls
    torch.shoal.synchronize()
    before = counted("round_trips")
    for _ in range(50):
        (x @ x + 1).relu_()
    assert counted("round_trips") == before


def test_numpy_and_lists() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    remote = torch.tensor(array, device="shoal")
    assert remote.cpu().numpy().tolist() == array.tolist()
    assert torch.as_tensor([1, 2, 3], device="shoal").tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="shoal"):
        remote.numpy()


def test_a_number_comes_to_pinned_memory_without_waiting_for_it() -> None:
    x = torch.full((1500, 1500), 1e-3, device="shoal")
    host = torch.zeros((), pin_memory=True)
    arrived = torch.Event("shoal")
    torch.shoal.synchronize()
    for _ in range(8):
        x = x @ x
    host.copy_(x.sum(), non_blocking=True)
    arrived.record()
    assert not arrived.query()  # the products take a second, the call took none of it
    arrived.synchronize()
    assert host.item() == x.sum().item()


def test_a_number_on_its_way_to_pinned_memory_can_be_sent_on() -> None:
    x = torch.full((1000, 1000), 1e-3, device="shoal")
    host = torch.zeros((), pin_memory=True)
    torch.shoal.synchronize()
    for _ in range(4):
        x = x @ x
    total = x.sum()
    host.copy_(total, non_blocking=True)
    again = host.to("shoal", non_blocking=True)  # in the stream's order: behind its arrival
    assert again.item() == total.item()
