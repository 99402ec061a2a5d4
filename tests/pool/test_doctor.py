"""`shoal doctor`: what it says where there is no pool, no libssl, and no way to write."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.pool.base.addresses import LOCAL_PREFIX
from tests.support import commands, needs
from tests.support.standing import shoal_command

WITHOUT_LIBSSL = """
for file in $(ldd "$1" | awk '/libssl/ {print $3}'); do mount --bind /dev/null "$file" || exit 99; done
shift
exec "$@"
"""


def without_libssl(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a mount namespace in which Python's libssl is an empty file."""
    found = importlib.util.find_spec("_ssl")
    ssl_module = found.origin if found is not None else None
    if os.getuid() != 0 or ssl_module is None:
        pytest.skip("hiding libssl needs root, and a Python that does not contain it")
    needs.command("unshare")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", WITHOUT_LIBSSL, "sh", ssl_module, *words],
        env=commands.environment(home), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"mount namespaces are not allowed here: {done.stderr}")
    return done


def test_doctor_says_that_libssl_is_missing(tmp_path: Path) -> None:
    done = without_libssl(tmp_path, *shoal_command("doctor"))
    assert done.returncode == 1, done.stderr
    assert "BAD   libssl" in done.stdout
    assert "apt install libssl3" in done.stdout
    assert done.stderr == ""


def test_a_pool_that_listens_says_that_libssl_is_missing(tmp_path: Path) -> None:
    done = without_libssl(
        tmp_path, *shoal_command("up", "--listen", "127.0.0.1", "--name", "t-ssl")
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("Error: ")
    assert "need OpenSSL 3, which cannot be loaded" in done.stderr


def test_a_program_on_its_own_machine_needs_no_libssl(tmp_path: Path) -> None:
    source = "import torch; print(torch.ones(3, device='shoal').sum().item())"
    done = without_libssl(tmp_path, sys.executable, "-c", source)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


def test_where_there_is_no_pool_nothing_is_wrong(tmp_path: Path) -> None:
    # The pool `default` of the user who runs the tests may be up: then there is one.
    if subprocess.run(shoal_command("status", "--pool", "default"), capture_output=True).returncode:
        done = commands.run(tmp_path, "doctor")
        assert done.code == 0, done.out
        assert "note  pool         none: SHOAL_POOL is not set" in done.out
        assert "Unset SHOAL_POOL" not in done.out
        assert "ok    pool" not in done.out


def test_a_pool_that_does_not_answer_is_not_called_good(tmp_path: Path) -> None:
    url = LOCAL_PREFIX + "0-nothing-here"
    done = commands.run(tmp_path, "doctor", SHOAL_POOL=url)
    assert done.code == 1
    assert "ok    pool" not in done.out
    assert "Unset SHOAL_POOL" in done.out
    done = commands.run(tmp_path, "doctor", "--pool", url)
    assert "Unset SHOAL_POOL" not in done.out


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "only programs that name it use it (no pool was asked for)"),
        ({"SHOAL_DEFAULT": "1"}, "programs use it unless they name another (SHOAL_DEFAULT)"),
        ({"SHOAL_DEFAULT": "0"}, "only programs that name it use it (SHOAL_DEFAULT=0)"),
    ],
)
def test_doctor_says_which_programs_use_the_device(
    tmp_path: Path, extra: dict[str, str], said: str
) -> None:
    assert f"ok    device       {said}" in commands.run(tmp_path, "doctor", **extra).out


def test_where_another_accelerator_is_usable_import_comes_first(tmp_path: Path) -> None:
    source = (
        "import shoal_autoload\n"
        "shoal_autoload.other_accelerator = lambda: 'cuda'\n"  # of the machine, which has none
        "from shoal.cli.main import main; main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=commands.environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "note  device       cuda is usable here" in done.stdout, done.stdout + done.stderr
    assert 'import shoal, before device="shoal"' in done.stdout


def test_doctor_names_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = commands.run(tmp_path, "doctor", SHOAL_STATE=str(tmp_path / "file" / "state"))
    assert done.code == 1
    assert f"BAD   state        {tmp_path}/file/state/default cannot be written" in done.out
    assert "export SHOAL_STATE=DIR" in done.out
