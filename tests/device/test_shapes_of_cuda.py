"""The client's shape rules are written for CPU kernels; torch's fake tensors say what CUDA's give.

A rule that answers otherwise would give a program on a GPU another dtype or size than its tensors
have. Other strides only cost a copy at the worker. Fake tensors do not know cuDNN's layouts.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from tests.device import test_shapes
from tests.device.test_shapes import KNOWN
from tests.standin.environment import Options, Run
from tests.support import programs

pytestmark = pytest.mark.slow  # the fake tensors need ten seconds to load

Meta = list[Any] | None  # sizes, dtype, strides

#: Cases whose strides differ: fake tensors do not know cuDNN's layouts.
OTHER_STRIDES = {
    "channels last", "weights with channels last", "both channels last", "all channels last",
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]

_FAKE = """
    import ctypes, json, os
    from pathlib import Path
    driver = Path(os.environ["SHOAL_CUDA_DRIVER"])
    for library in (driver, driver.with_name("libshoal_standin.so")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # CUDA's guard: views ask for it
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from tests.device import test_shapes

    for dtype in (torch.float32, torch.bfloat16):
        test_shapes.numbers = lambda d, *sizes: torch.empty(*sizes, device=d, dtype=dtype)
        with FakeTensorMode():
            for name, make in test_shapes.KNOWN.items():
                try:
                    made = test_shapes.tensors(make("cuda", 3))
                except RuntimeError:
                    continue  # it does not take this dtype
                print(json.dumps([f"{name} {dtype}", [
                    None if t is None else [list(t.shape), str(t.dtype), list(t.stride())]
                    for t in made
                ]]))
"""


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, list[Meta]]:
    """What the fake tensors of a torch with CUDA say."""
    run = Run(Options("late"))
    try:
        variables = run.environment()
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(programs.ROOT)])
        text = programs.succeed(_FAKE, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **variables)
    finally:
        run.close()
    return dict(json.loads(line) for line in text.splitlines() if line.startswith("["))


def meta(tensor: torch.Tensor | None) -> Meta:
    if tensor is None:
        return None
    return [list(tensor.shape), str(tensor.dtype), list(tensor.stride())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_rule_answers_as_cuda_would(
    on_cuda: dict[str, list[Meta]], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(device: str, *sizes: int) -> torch.Tensor:
        return torch.ones(*sizes, dtype=dtype).to(device)

    monkeypatch.setattr(test_shapes, "numbers", numbers)
    before = torch.shoal.traffic()["round_trips"]
    try:
        ours = [meta(tensor) for tensor in test_shapes.tensors(KNOWN[name]("shoal", 3))]
    except RuntimeError:
        assert dtype != torch.float32
        pytest.skip("the CPU's kernels do not take this dtype")
    if torch.shoal.traffic()["round_trips"] > before:
        assert dtype != torch.float32
        pytest.skip("no rule answers, so the device does")
    for our, their in zip(ours, on_cuda[f"{name} {dtype}"], strict=True):
        assert (our is None) == (their is None)
        if our is None or their is None:
            continue
        assert our[:2] == their[:2]
        if name not in OTHER_STRIDES:
            for a, b, size in zip(our[2], their[2], our[0], strict=True):
                assert a == b or size == 1, (our, their)
