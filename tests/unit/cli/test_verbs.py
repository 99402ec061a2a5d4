"""What is typed wrong, and what goes wrong on the way: one message and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from tests.support import commands, programs
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until


def test_python_m_shoal_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "--help"],
        env=commands.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: shoal ")
    assert "doctor" in done.stdout


@pytest.mark.parametrize("verb", ["version", "--version"])
def test_the_version(tmp_path: Path, verb: str) -> None:
    done = commands.run(tmp_path, verb)
    assert (done.code, done.out) == (0, f"shoal {shoal.__version__}\n"), done.err


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("doktor", "doctor"), ("statsu", "status")]
)
def test_a_verb_that_does_not_exist(tmp_path: Path, typed: str, meant: str) -> None:
    done = commands.run(tmp_path, typed)
    assert done.code == 2
    assert f"No such command '{typed}'" in done.err
    assert f"Did you mean `shoal {meant}`?" in done.err


def test_a_verb_like_no_other_names_the_help(tmp_path: Path) -> None:
    done = commands.run(tmp_path, "xyzzy")
    assert done.code == 2
    assert "shoal --help" in done.err
    assert "Did you mean" not in done.err


BROKEN = """
import shoal.cli.status, sys
def broken(url): raise {error}
shoal.cli.status.read_status = broken
from shoal.cli.main import main
main(["status"])
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OSError(28, 'No space left on device', '/x')", "/x: No space left on device"),
        ("KeyError('x')", "this is a bug in Shoal: KeyError: 'x'"),
    ],
)
def test_an_error_that_nobody_expected_is_one_line(error: str, said: str) -> None:
    source = BROKEN.format(error=error)
    done = programs.run(source)
    assert done.code == 1
    assert done.err.startswith("Error: ")
    assert said in done.err
    assert "SHOAL_DEBUG=1" in done.err
    assert len(done.err.splitlines()) == 1
    assert "Traceback" in programs.run(source, SHOAL_DEBUG="1").err


def test_ctrl_c_is_exit_code_130_and_no_traceback(tmp_path: Path) -> None:
    """`shoal top` waits for nobody but the user; here it runs on a pool that this program has."""
    with shoal.up(["cpu,memory=16MiB,threads=1"]) as pool:
        top = subprocess.Popen(
            shoal_command("top", "--json", "--pool", pool.url),
            env=commands.environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert top.stdout is not None
        assert top.stdout.readline()
        os.kill(top.pid, signal.SIGINT)
        wait_until(lambda: top.poll() is not None, 30, "the command has ended")
        assert (top.returncode, top.communicate()[1]) == (130, "")
