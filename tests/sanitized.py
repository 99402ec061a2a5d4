"""Runs the device tests against a core that is built with AddressSanitizer and UBSan.

`python tests/sanitized.py BUILD_DIR [pytest arguments]` makes an overlay of the package whose core is
the one in BUILD_DIR, and starts pytest with the sanitizer's run-time preloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Without the tests that measure a process's memory: the sanitizer's own is many times more, and it
#: keeps what was freed.
SKIPPED = "not conformance and not fill_the_machines_memory and not is_not_hoarded"
#: Both ends of the data connections: lanes, hostile clients, hostile workers.
NETWORK = [
    "tests/pool/network/test_remote.py",
    "tests/fault/test_data_connections.py",
    "tests/fault/test_hostile_workers.py",
]
#: Copies between devices that are made when they are needed, and devices that die meanwhile.
MEMORY = ["tests/pool/memory/test_lazy_copies.py", "tests/fault/test_memory_faults.py"]
DEVICE = ["tests/device", "tests/fault/test_hostile.py"]
DEFAULT = [*DEVICE, *NETWORK, *MEMORY, "-m", "not slow", "-k", SKIPPED]

#: An editable install answers for `shoal` before PYTHONPATH does; the overlay must win.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
"""


def overlay(build: Path) -> Path:
    """A directory with our Python sources and the sanitized core."""
    site = build / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "shoal", site / "shoal")
    core = next(build.glob("_core.*.so"))
    shutil.copy(core, site / "shoal" / core.name)
    (site / "sitecustomize.py").write_text(SITE)
    return site


def library(name: str) -> str:
    """Where the compiler's own library is."""
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    # The C++ library too: Python loads it late, and the sanitizer wants to find its `throw` at once.
    runtime = " ".join(library(name) for name in ("libasan.so", "libstdc++.so"))
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "PYTHONPATH": str(overlay(build)),
        "OMP_NUM_THREADS": "1",
        # Python and torch keep much until the end; leaks of ours show in the counters' tests.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    arguments = sys.argv[2:] or DEFAULT
    command = [sys.executable, "-m", "pytest", "--timeout", "600", *arguments]
    return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    raise SystemExit(main())
