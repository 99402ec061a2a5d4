"""Brings the stand-in into every Python process of a run, by PYTHONPATH. See ../README.md."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

#: In the command lines of processes that use accelerators. Programs of the user do not.
_USERS = (
    "shoal.pool.node.device_server",
    "shoal.pool.node.measuring.probe",
    "machine.print_answer",
)
_HERE = Path(__file__).resolve().parents[1]

if "SHOAL_TEST_STANDIN" in os.environ and any(
    user in word for word in sys.orig_argv[1:3] for user in _USERS
):
    runpy.run_path(os.environ["SHOAL_TEST_STANDIN"])

if os.environ.get("STANDIN_INSTEAD_OF_CPU") == "1":
    spec = importlib.util.spec_from_file_location("_instead_of_cpu", _HERE / "instead_of_cpu.py")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.install()
