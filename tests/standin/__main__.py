"""`python -m tests.standin late -- CMD…`: run any program with the stand-in as Shoal's accelerator."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from shoal.units import parse_bytes
from tests.standin.environment import MODES, Options, Run

_RACES = 99
_NO_KERNEL = 98


def main() -> int:
    """Run the command and judge it."""
    parser = argparse.ArgumentParser(prog="python -m tests.standin", description=__doc__)
    parser.add_argument("mode", choices=MODES, help="the order in which the devices' streams run")
    parser.add_argument("--devices", type=int, default=1, help="how many devices there are")
    parser.add_argument("--memory", type=parse_bytes, help="of each device, for example 256MiB")
    parser.add_argument("--seed", type=int, help="of the order in mode random")
    parser.add_argument("--fail-call", type=int, default=0, help="the driver call that fails")
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " -- CMD…"
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:end]), words[end + 1 :]
    if not command:
        parser.error("name the program: python -m tests.standin late -- python program.py")
    run = Run(
        Options(
            arguments.mode, arguments.devices, arguments.memory, arguments.seed, arguments.fail_call
        )
    )
    try:
        code = _run(command, {**os.environ, **run.environment()})
        counts = run.counts()
    finally:
        run.close()
    print(f"standin: {counts}", file=sys.stderr, flush=True)
    if counts.races:
        return _RACES
    return code if code or counts.kernels else _NO_KERNEL


def _run(command: list[str], environment: dict[str, str]) -> int:
    program = subprocess.Popen(command, env=environment)
    # The program hears Ctrl-C itself. It decides how to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
    code = program.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
