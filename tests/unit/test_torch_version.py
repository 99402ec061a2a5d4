"""With another torch than the core was built for, Shoal says what to type, and torch works on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from shoal import device
from tests.support import programs

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
TYPE = f"Type: pip install torch=={device.TORCH_VERSION}"


def test_the_core_was_built_for_the_installed_torch() -> None:
    assert torch.__version__.partition("+")[0] == device.TORCH_VERSION


def test_the_build_and_the_wheel_name_one_torch() -> None:
    """`make test-torch` builds for others without them."""
    (wanted,) = (n for n in PROJECT["project"]["dependencies"] if n.startswith("torch"))
    assert wanted in PROJECT["build-system"]["requires"]
    assert wanted.startswith("torch==")


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_every_build_of_the_release_fits(build: str) -> None:
    device.check_torch(device.TORCH_VERSION + build)


@pytest.mark.parametrize(
    "found", ["1.13.1+cpu", f"{device.TORCH_VERSION}rc1", f"{device.TORCH_VERSION}.1"]
)
def test_another_release_is_refused_with_the_line_to_type(found: str) -> None:
    with pytest.raises(ImportError, match=f"torch {found.partition('+')[0]}") as raised:
        device.check_torch(found)
    assert str(raised.value).endswith(TYPE)


OTHER = """
    import os, warnings
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    torch.__version__ = "1.13.1+cpu"
    {program}
"""


def test_import_torch_warns_and_goes_on() -> None:
    program = """
    import shoal_autoload
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shoal_autoload.autoload()
    (warning,) = caught
    print(warning.message)
    print(torch.ones(2).sum().item())
    """
    said, worked = programs.succeed(OTHER.replace("{program}", program)).splitlines()
    assert TYPE in said
    assert worked == "2.0"


def test_a_program_that_asks_for_a_pool_gets_the_error() -> None:
    done = programs.run(OTHER.replace("{program}", "import shoal; shoal.connect()"))
    assert done.code == 1
    assert done.err.strip().endswith(TYPE)
