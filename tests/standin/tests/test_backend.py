"""torch's `cuda` on the stand-in, without Shoal: each program is a process with torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.standin.environment import Counts, Options, Run

ROOT = Path(__file__).resolve().parents[3]
_START = """
import os, runpy
runpy.run_path(os.environ["SHOAL_TEST_STANDIN"])
import torch
"""


def program(
    text: str, options: Options | None = None
) -> tuple[subprocess.CompletedProcess[str], Counts]:
    run = Run(options or Options("late"))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START + textwrap.dedent(text)],
            env={**os.environ, **run.environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        return done, run.counts()
    finally:
        run.close()


def test_the_host_cannot_read_a_tensor() -> None:
    done, _ = program(
        """
        import ctypes
        ctypes.string_at(torch.ones(4, device="cuda:0").data_ptr(), 1)
        """
    )
    assert done.returncode == -signal.SIGSEGV


def test_memory_runs_out_inside_an_operator_and_the_program_goes_on() -> None:
    done, _ = program(
        """
        x = torch.ones(8 << 20, device="cuda:0")
        try:
            x.repeat(8) + x.repeat(8)
        except torch.OutOfMemoryError as error:
            print("out of memory" in str(error))
        print((x + 1).sum().item() == 2 * (8 << 20))
        """,
        Options("late", memory_bytes=256 << 20),
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_an_index_out_of_range_is_a_device_assert_that_stays() -> None:
    done, _ = program(
        """
        y = torch.zeros(3, device="cuda:0").index_select(0, torch.tensor([9], device="cuda:0"))
        for _ in range(2):
            try:
                y.cpu()
            except torch.AcceleratorError as error:
                print(error.error_code, str(error).count("index out of range"))
        """
    )
    assert done.stdout.split() == ["710", "1"] * 2, done.stderr


def test_shapes_that_depend_on_values_wait_for_them() -> None:
    done, _ = program(
        """
        x = torch.tensor([3, -1, 0, 3])
        d = x.to("cuda:0")
        for of in (
            lambda x: x[x > 0], torch.nonzero, torch.unique, torch.bincount,
            lambda x: x.masked_select(x == 3), lambda x: torch.repeat_interleave(x, x.abs()),
            lambda x: torch.histc(x.int(), 4, -1, 3) if x.is_cuda else torch.histc(x.float(), 4, -1, 3),
        ):
            if of is torch.bincount:
                x, d = x.abs(), d.abs()
            print(torch.equal(of(d).cpu(), of(x).to(of(d).dtype)))
        """
    )
    assert done.stdout.split() == ["True"] * 7, done.stderr


#: Draws on the device, in place and not, and computes with it.
DRAWS = """
torch.manual_seed(3)
x = torch.randn(64, 64, device="cuda:0")
w = torch.empty(64, 64, device="cuda:0").uniform_(-1, 1)
for _ in range(5):
    x = torch.nn.functional.dropout(torch.tanh(x @ w), 0.25)
    w.add_(torch.bernoulli(torch.full_like(w, 0.5)), alpha=0.01)
print(x.double().sum().item(), w.double().sum().item(), torch.randperm(9, device="cuda:0").tolist())
"""


@pytest.mark.parametrize("mode", ["late", pytest.param("random", marks=pytest.mark.slow)])
def test_random_numbers_do_not_depend_on_when_kernels_run(mode: str) -> None:
    now, _ = program(DRAWS, Options("now"))
    other, counts = program(DRAWS, Options(mode))
    assert now.stdout == other.stdout != "", other.stderr
    assert counts.kernels > 20
    assert counts.races == 0
