"""What a program sets in torch is in force at the worker, from the next call on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TINY = 1e-310  # a denormal float64


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")


def alike(run: Callable[[torch.Tensor], torch.Tensor], argument: torch.Tensor) -> None:
    expected, found = run(argument), run(argument.to("shoal"))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_the_default_dtype_decides_results_of_integers(dtype: torch.dtype) -> None:
    numbers = torch.arange(1, 7)
    for default in (torch.float32, dtype, torch.float32, dtype):  # also after a cached call
        torch.set_default_dtype(default)
        alike(lambda t: t / 4, numbers)
        alike(torch.sqrt, numbers)
        alike(lambda t: torch.where(t > 2, 0.5, 1.5), numbers)


def test_an_operation_without_a_deterministic_form_is_refused() -> None:
    target = torch.zeros(4, device="shoal")
    index = torch.tensor([1, 1], device="shoal")
    source = torch.ones(2, device="shoal")
    assert target.put_(index, source).sum().item() == 1
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        target.put_(index, source).cpu()
    torch.use_deterministic_algorithms(False)
    assert torch.zeros(4, device="shoal").put_(index, source).sum().item() == 1


def test_determinism_fills_uninitialized_memory() -> None:
    torch.use_deterministic_algorithms(True)
    alike(lambda t: torch.empty(5, device=t.device), torch.zeros(1))
    alike(lambda t: torch.empty(5, dtype=torch.int32, device=t.device), torch.zeros(1))
    alike(lambda t: torch.empty_strided((2, 3), (1, 2), device=t.device), torch.zeros(1))
    alike(lambda t: torch.ones(2, device=t.device).resize_(6), torch.zeros(1))
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        before = torch.shoal.traffic()["messages"]
        torch.empty(5, device="shoal")
        assert torch.shoal.traffic()["messages"] == before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_denormals_are_flushed_where_the_program_flushes_them() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    torch.set_flush_denormal(False)
    tiny = torch.tensor([TINY], dtype=torch.float64)
    for flush in (False, True, False):
        torch.set_flush_denormal(flush)
        alike(lambda t: t * 1.0, tiny)
    torch.set_flush_denormal(True)
    weight = torch.tensor([TINY], dtype=torch.float64, device="shoal", requires_grad=True)
    (weight * 1.0).sum().backward()  # in torch's thread for the device
    assert (weight.detach() * 1.0).item() == 0


def test_another_thread_has_its_own_mode() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    tiny = torch.tensor([TINY], dtype=torch.float64).to("shoal")
    found = []

    def other() -> None:
        torch.set_flush_denormal(False)
        found.append((tiny * 1.0).item())

    for _ in range(2):
        assert (tiny * 1.0).item() == 0
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [TINY, TINY]


def test_the_kernel_of_attention_follows_the_program() -> None:
    query = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).to("shoal")
    names = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            names.append(int(torch._fused_sdp_choice(query, query, query)))
    assert names == [1, 0, 1]


def test_settings_travel_when_they_change_and_not_before() -> None:
    x = torch.ones(3, device="shoal")
    (x @ x).item()

    def messages() -> int:
        before = torch.shoal.traffic()["messages"]
        y = x @ x
        del y
        return torch.shoal.traffic()["messages"] - before

    usual = messages()
    assert messages() == usual
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # not among the bytes of the others
    try:
        assert messages() == usual + 1
        assert messages() == usual
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert messages() == usual + 1
    # torch's own test tools, which other tests load, allow this way only.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert messages() == usual + 1
