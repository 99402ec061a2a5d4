"""`python -m bench.first_hour`: check and measure a GPU that nobody has tried Shoal on."""

from __future__ import annotations

import argparse
import json
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import shoal
from bench.first_hour import device, driver, faults
from bench.first_hour.finding import Finding

Check = Callable[[bool], Iterator[Finding]]
CHECKS: dict[str, Check] = {
    "facts": device.facts,
    "sessions": faults.sessions,
    "results": device.results,
    "settings": device.settings,
    "driver": driver.check,
    "waits": device.waits,
    "steps": device.steps,
    "shortage": faults.shortage,
    "peers": device.peers,
    "killed": faults.killed,
    "assert": faults.device_assert,
}
CHECK_S_MAX = 300.0


def run_alone(name: str, quick: bool) -> list[Finding]:
    """Run a check in a process of its own: one that hangs or crashes is a finding, too."""
    command = [sys.executable, "-m", "bench.first_hour", "--only", name, *["--quick"] * quick]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHECK_S_MAX, check=False
        )
        lines, code = done.stdout.splitlines(), done.returncode
        last = (done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""  # bytes, whatever `text` says
        text = output if isinstance(output, str) else output.decode()
        lines, code = text.splitlines(), 1
        last = f"did not end in {CHECK_S_MAX:g} s"
    found = [Finding(**json.loads(line)) for line in lines if line.startswith("{")]
    if code != 0:
        found.append(Finding(f"check {name!r} ran to its end", False, note=last))
    return found


def show(findings: list[Finding]) -> None:
    """Print rows of the table."""
    for one in findings:
        print(f"{one.verdict:7} {one.name:46} {one.shown:>24}   {one.expected:18} {one.note[:80]}")
    sys.stdout.flush()


def main() -> int:
    """Run all checks, or one of them and print it for the caller."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_hour", description=__doc__)
    parser.add_argument("--only", choices=CHECKS, help="run one check here; print lines of JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--output", type=Path, help="the file; default: first-hour-HOST.json")
    arguments = parser.parse_args()
    if arguments.only:
        for one in CHECKS[arguments.only](arguments.quick):
            line = {k: v for k, v in one.report().items() if k != "verdict"}
            print(json.dumps(line), flush=True)
        return 0
    print(f"{'':7} {'what':46} {'found':>24}   {'expected':18} note")
    found: dict[str, list[Finding]] = {}
    for name in CHECKS:
        found[name] = run_alone(name, arguments.quick)
        show(found[name])
    path = arguments.output or Path(f"first-hour-{socket.gethostname()}.json")
    report = {
        "shoal": shoal.__version__,
        "torch": torch.__version__,
        "system": platform.platform(),
        "quick": arguments.quick,
        "findings": {name: [one.report() for one in some] for name, some in found.items()},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    verdicts = [one.verdict for some in found.values() for one in some]
    print(f"\n{verdicts.count('FAILED')} failed, {verdicts.count('odd')} odd. Send in {path}.")
    return 1 if "FAILED" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
