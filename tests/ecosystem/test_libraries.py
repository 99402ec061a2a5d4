"""Libraries choose shoal when the user asked for it, compute what the CPU computes, and obey."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.ecosystem import libraries
from tests.ecosystem.libraries import CASES, FOLLOWS, FULL, MEMORY_CASES, UNRECORDED, Case
from tests.support import programs

#: Cases in which the library chooses. Where the program names shoal, a guest has nothing to show, and
#: where diffusers finds no accelerator, offloading is its own error, with Shoal installed or without.
GUESTS = [c for c in CASES if c.how != FOLLOWS and 'accelerator="shoal"' not in c.call]
GUESTS = [
    c
    for c in GUESTS
    if c.precision in (FULL, UNRECORDED) and not c.name.endswith(("_named", "_offload"))
]


def _name(case: Case) -> str:
    return case.name


def _same(chosen: list[Any], told: list[Any], case: Case) -> bool:
    """Return whether the compared values are the same digits; fail if they are not close."""
    tolerance, compared = case.precision.tolerance, case.precision.compared
    chosen, told = chosen[:compared], told[:compared]
    if chosen and isinstance(chosen[0], float):
        assert chosen == pytest.approx(told, rel=tolerance, abs=tolerance)
    else:
        assert chosen == told
    return chosen == told


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_asked(case: Case, pool: str, results: list[dict[str, Any]]) -> None:
    """Both in one process: the library's own choice, and the CPU that the program demands."""
    libraries.need(case)
    found = libraries.run(case, "both", asked={"SHOAL_POOL": pool}, timeout_s=220)
    chosen, told = found["chosen"], found["told"]
    assert chosen["device"] == "shoal:0"
    assert told["device"] == "cpu"
    assert found["warnings"] == []
    if case.precision.dtype:
        assert chosen["dtypes"] == [case.precision.dtype]
        assert chosen["scaler"] == case.precision.scaler
    digits = _same(chosen["values"], told["values"], case)
    results.append(
        {
            "library": case.library,
            "version": importlib.metadata.version(case.library),
            "call": case.call,
            "how": case.how,
            "dtype": case.precision.dtype,
            "equal": "same digits" if digits else f"within {case.precision.tolerance:g}",
        }
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", GUESTS, ids=_name)
def test_guest(case: Case) -> None:
    """Shoal is installed and nobody asked for it: the CPU, and no process of a pool."""
    libraries.need(case)
    found = libraries.run(case, "chosen", asked={}, timeout_s=220)
    assert found["chosen"]["device"] == "cpu"
    assert found["processes"] == []
    assert found["warnings"] == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", MEMORY_CASES, ids=_name)
def test_out_of_memory(case: Case, small_pool: str, results: list[dict[str, Any]]) -> None:
    """The library takes Shoal's error for what it is, and goes on with a smaller batch."""
    libraries.need(case)
    found = libraries.run(case, "chosen", asked={"SHOAL_POOL": small_pool}, timeout_s=220)
    tried = found["chosen"]["tried"]
    assert found["chosen"]["device"] == "shoal:0"
    assert 0 < tried[-1] < tried[0]
    results.append(
        {
            "library": case.library,
            "version": importlib.metadata.version(case.library),
            "call": case.call,
            "how": case.how,
            "dtype": "",
            "equal": "reduces the batch",
        }
    )


@pytest.mark.parametrize("name", ["accelerate:accelerator", "transformers:pipeline_named"])
def test_embedded_pool(name: str) -> None:
    """SHOAL_DEFAULT=1 alone starts a pool. A model that a guest puts on shoal by name stays there."""
    case = next(c for c in CASES if c.name == name)
    libraries.need(case)
    asked = {} if name.endswith("named") else {"SHOAL_DEFAULT": "1"}
    found = libraries.run(case, "chosen", asked=asked)
    assert found["chosen"]["device"] == "shoal:0"
    assert found["warnings"] == []


def test_asked_and_taken_back(pool: str) -> None:
    """SHOAL_DEFAULT=0 makes a guest of a program that has a pool."""
    case = next(c for c in CASES if c.name == "accelerate:accelerator")
    libraries.need(case)
    found = libraries.run(case, "chosen", asked={"SHOAL_POOL": pool, "SHOAL_DEFAULT": "0"})
    assert found["chosen"]["device"] == "cpu"


def test_named_only() -> None:
    """A program that names shoal keeps the library's choice, and hears once what to set."""
    libraries.need(next(c for c in CASES if c.name == "accelerate:accelerator"))
    source = """
        import warnings, torch
        from accelerate import Accelerator, PartialState
        torch.ones(1, device="shoal")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            print(Accelerator().device)
            print(PartialState().default_device)
        for warning in seen:
            if "shoal" in str(warning.message):
                print(warning.message)
    """
    first, second, warning = programs.succeed(source).splitlines()
    assert (first, second) == ("cpu", "cpu")
    assert "accelerate chose the CPU" in warning
    assert "SHOAL_DEFAULT=1" in warning
    assert "ACCELERATE_TORCH_DEVICE=shoal" in warning
