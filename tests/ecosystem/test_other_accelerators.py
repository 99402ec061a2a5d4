"""A machine where CUDA is usable: Shoal takes its name only when the program or its user asks.

No such machine is at hand, so the programs pretend: they run the entry point by hand, after telling it
that CUDA is there. Everything behind that answer is real.
"""

from __future__ import annotations

import pytest

import shoal_autoload
from tests.support import programs

PRETEND = """
    import sys, torch, shoal_autoload
    shoal_autoload.other_accelerator = lambda: "cuda"
    shoal_autoload.autoload()
"""
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SHOAL_IDENTITY": "/nonexistent"}


def test_without_asking_torch_does_not_know_the_device() -> None:
    program = f"""{PRETEND}
    print([name for name in sys.modules if name.split(".")[0] == "shoal"])
    print(hasattr(torch, "shoal"), torch.accelerator.current_accelerator())
    try:
        torch.ones(2, device="shoal")
    except RuntimeError as error:
        print(str(error).partition(",")[0])
    """
    lines = programs.succeed(program, **ALONE).splitlines()
    assert lines == ["[]", "False None", "Expected one of cpu"]


@pytest.mark.parametrize("order", ["after torch", "before torch"])
def test_importing_shoal_gives_the_name(order: str) -> None:
    early, late = ("import shoal", "") if order == "before torch" else ("", "import shoal")
    program = f"""
    {early}
    {PRETEND.strip()}
    torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()  # autograd starts without the device
    {late}
    layer = torch.nn.Linear(2, 1).to("shoal")
    layer(torch.ones(1, 2, device="shoal")).sum().backward()
    print(layer.weight.grad.tolist(), torch.accelerator.current_accelerator(check_available=True))
    """
    assert programs.succeed(program, **ALONE).strip() == "[[1.0, 1.0]] shoal"


def test_asking_gives_the_name() -> None:
    program = f"""{PRETEND}
    print(torch.ones(2, device="shoal").sum().item())
    """
    assert programs.succeed(program, **ALONE, SHOAL_DEFAULT="1").strip() == "2.0"


@pytest.mark.parametrize(
    ("files", "built", "environment", "found"),
    [
        ([], True, {}, ""),
        (["/dev/nvidia0"], True, {}, "cuda"),
        (["/dev/nvidia0"], False, {}, ""),
        (["/dev/nvidia0"], True, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        (["/dev/nvidia0"], True, {"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        (["/dev/nvidia0"], True, {"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        (["/dev/kfd"], True, {}, "cuda"),
    ],
)
def test_an_accelerator_is_found_without_its_driver(
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    built: bool,
    environment: dict[str, str],
    found: str,
) -> None:
    import fnmatch

    import torch

    def matching(pattern: str) -> list[str]:
        return fnmatch.filter(files, pattern)

    monkeypatch.setattr(shoal_autoload.glob, "glob", matching)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: built)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shoal_autoload.other_accelerator() == found
