"""Run small programs as a user's own, with Shoal installed or without, and see what they did.

`run` takes one program. `ask` takes many short questions and puts them to one process, because
`import torch` takes more than a second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.programs import ROOT

#: Variables of the developer that change what torch and its libraries choose.
_DROPPED = re.compile(
    r"SHOAL_|XDG_|ACCELERATE_|HF_|TRANSFORMERS_|TORCH|PYTORCH_|FSDP_|PL_|LT_|"
    r"(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|PYTHONPATH|HOME)$"
)
_XDG = ("CONFIG_HOME", "DATA_HOME", "CACHE_HOME", "STATE_HOME", "RUNTIME_DIR")
TIMEOUT_S = 110.0


def environment(
    home: Path, *, installed: bool = True, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a user whose home is `home`, without anything of the developer's."""
    kept = {k: v for k, v in os.environ.items() if not _DROPPED.match(k)}
    kept |= {f"XDG_{name}": str(home / name.lower()) for name in _XDG}
    kept |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    kept["TORCHINDUCTOR_CACHE_DIR"] = str(home / "inductor")  # else it is shared by all programs
    if not installed:
        kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return kept | dict(env or {})


def run(
    program: str,
    *,
    env: Mapping[str, str] | None = None,
    installed: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Run a program to its end and report what it did.

    Args:
        program: Python source. It runs as `__main__`, after `import torch`.
        env: more environment variables. SHOAL_POOL and SHOAL_DEFAULT are unset unless given here.
        installed: False for torch without Shoal.
        timeout_s: seconds until the program and its children are killed and the test fails.

    Returns a dictionary:
        answer: the last line of the output, parsed as JSON; None if it is not JSON.
        error: None, or `{"type": …, "text": …}` of the exception that ended the program.
        warnings: `"Category: text"` of each warning, in order, once per text.
        threads: how many the program had at its end.
        files: how many descriptors it had open at its end, beyond those that torch had.
        started: the command line of each process that it started ("fork" for a fork).
        children: the command lines of its descendants that were alive at its end.
        connections: the addresses to which Python code opened a socket.
        modules: the shoal modules that were imported after `import torch` had ended.
        out, err: what it wrote.
        seconds: how long the process lived.

    >>> run("print(1 + 1)")["answer"]
    2
    """
    report = _child({"program": program}, env=env, installed=installed, timeout_s=timeout_s)
    result = report.pop("sections")["program"]
    result["threads"] += report.pop("alone")  # how many torch had at the end of its import
    lines = report["out"].strip().splitlines()
    try:
        result["answer"] = json.loads(lines[-1]) if lines else None
    except ValueError:
        result["answer"] = None
    return {**report, **result}


def ask(
    questions: Mapping[str, str],
    *,
    env: Mapping[str, str] | None = None,
    installed: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, dict[str, Any]]:
    """Run many short programs in one process, in order, each with global names of its own.

    Returns for each question what `run` returns, except `out`, `err` and `seconds`. Here `answer` is
    the value of the program's variable `answer`; `threads`, `files`, `started`, `connections` and
    `modules` hold only what this question added.

    >>> ask({"sum": "answer = 1 + 1"})["sum"]["answer"]
    2
    """
    report = _child(questions, env=env, installed=installed, timeout_s=timeout_s)
    sections: dict[str, dict[str, Any]] = report["sections"]
    return sections


def _child(
    sections: Mapping[str, str],
    *,
    env: Mapping[str, str] | None,
    installed: bool,
    timeout_s: float,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        home = root / "home"
        home.mkdir()
        files = []
        for number, (name, source) in enumerate(sections.items()):
            path = root / f"program_{number}.py"
            path.write_text(textwrap.dedent(source))
            files.append((name, str(path)))
        plan, report = root / "plan.json", root / "report.json"
        plan.write_text(json.dumps(files))
        start = time.monotonic()
        out, err, code = _wait(
            [sys.executable, "-m", "tests.ecosystem.child", str(plan), str(report)],
            environment(home, installed=installed, env=env),
            timeout_s,
        )
        if not report.exists():
            raise AssertionError(f"the program ended with {code} and no report:\n{out}{err}")
        found: dict[str, Any] = json.loads(report.read_text())
        return {**found, "out": out, "err": err, "seconds": time.monotonic() - start}


def _wait(command: list[str], env: dict[str, str], timeout_s: float) -> tuple[str, str, int]:
    """Run a command in a session of its own; kill the whole session if it takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=env["HOME"],
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"the program did not end in {timeout_s:g} s:\n{out}{err}") from None
    return out, err, process.returncode
