"""Pools that cannot start: one message that says why, an exit code, and nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.pool.base import limits
from shoal.pool.local.local_pool import Pool
from shoal.pool.node.spec import parse_device
from tests.support import commands, programs
from tests.support.standing import StandingPool

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
GOOD = "cpu,memory=16MiB,threads=1"
DECLARED = [
    pytest.param("cqu", "'cqu' is not a device that torch knows. Did you mean cpu?", id="typo"),
    pytest.param("cudda:0", "Did you mean cuda?", id="typo-of-cuda"),
    pytest.param("meta", "'meta' is not a device that torch computes on", id="meta"),
    pytest.param(
        "cuda:0",
        f"this torch ({torch.__version__}) has no CUDA"
        if torch.version.cuda is None
        else "finds no CUDA device on this machine",
        id="cuda",
        marks=NO_CUDA,
    ),
    pytest.param("cpu,memory=0", "memory must be above 0", id="no-memory"),
    pytest.param("cpu,memory=1000TiB", "is more than this machine has, which is", id="memory"),
]


@pytest.mark.parametrize("verb", ["up", "node"])
@pytest.mark.parametrize(("declared", "said"), DECLARED)
def test_a_device_that_cannot_be_is_one_message(
    tmp_path: Path, verb: str, declared: str, said: str
) -> None:
    text = commands.refused(tmp_path, verb, "--device", GOOD, "--device", declared)
    assert said in text
    assert not (tmp_path / "state").exists(), "it was refused before anything started"


@pytest.mark.parametrize(("declared", "said"), DECLARED)
def test_a_program_that_declares_one_is_told_at_once(declared: str, said: str) -> None:
    with pytest.raises(shoal.DeviceSpecError) as raised:
        shoal.up([declared])
    assert said in str(raised.value)


def test_two_devices_of_one_name(tmp_path: Path) -> None:
    text = commands.refused(tmp_path, "up", *["--device", "cpu,memory=1MiB,name=x"] * 2)
    assert "2 devices are named x; tell them apart with name=" in text


def test_more_threads_and_memory_together_than_there_is_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 6 // 10
    declared = [f"cpu,memory={half},threads=999", f"cpu,memory={half},threads=1"]
    with shoal.up(declared):
        pass
    threads, memory = (r.getMessage() for r in caplog.records)
    assert "threads=999 is more than this machine's" in threads
    assert "the CPU devices together have" in memory
    assert "GiB" in memory


def broken(*declared: str) -> Pool:
    """A pool whose devices were not checked: what a driver that fails looks like."""
    return Pool([parse_device(text, number) for number, text in enumerate(declared)])


@NO_CUDA
def test_a_device_server_that_does_not_start_says_why() -> None:
    source = """
    import shoal
    from shoal.pool.local.local_pool import Pool
    from shoal.pool.node.spec import parse_device
    with Pool([parse_device("cuda:77")]) as pool:
        try:
            shoal.connect(pool.url)
        except shoal.LeaseError as error:
            print(error)
    """
    done = programs.run(source)
    assert done.code == 0, done.err
    assert "device server cuda:77 did not start: " in done.out
    assert "CUDA" in done.out
    assert "SIGKILL" not in done.out
    assert "Traceback" not in done.err
    (line,) = done.err.splitlines()
    assert " ERROR pool: device server cuda:77 did not start: " in line


@NO_CUDA
def test_a_broken_device_does_not_hide_the_others() -> None:
    with broken("cuda:77", "cpu,memory=64MiB,name=good") as pool:
        with shoal.connect(pool.url) as lease:
            assert [d.info.name for d in lease.granted] == ["good"]
            assert torch.ones(2, device="shoal").sum().item() == 2


AGENT = "shoal.pool.local.agent_process"


def agent(tmp_path: Path, *devices: str) -> subprocess.Popen[bytes]:
    """The agent of a standing pool, which was not told that its devices are not there."""
    options = {"pool_id": f"t-{os.getpid()}-{tmp_path.name}", "node": "n1", "devices": devices}
    return subprocess.Popen(
        [sys.executable, "-m", AGENT, json.dumps(options)],
        env=commands.environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@NO_CUDA
def test_an_agent_without_any_device_ends_and_says_why(tmp_path: Path) -> None:
    out, err = (process := agent(tmp_path, "cuda:77")).communicate(timeout=60)
    assert process.returncode == 1
    assert out.startswith(b"failed device server cuda:77 did not start: "), out
    assert err == b""


@NO_CUDA
def test_a_device_that_never_came_up_is_not_tried_for_ever(tmp_path: Path) -> None:
    process = agent(tmp_path, "cuda:77", GOOD)
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        assert " ERROR agent[n1]: device server cuda:77 did not start: " in line
        assert "starts it again" not in line
    finally:
        process.kill()
        process.communicate()


def test_a_device_server_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """Without torch it cannot even load its core; that is no refusal of its own."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shoal.pool.node.device_server' in ' '.join(sys.orig_argv): os._exit(7)\n"
    )
    environment = commands.environment(tmp_path)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    options = {"pool_id": f"t-{os.getpid()}-again", "node": "n1", "devices": [GOOD]}
    source = "import shoal.pool.local.agent_process as p; p.give_up = None; p.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", source, json.dumps(options)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(limits.START_ATTEMPTS_MAX)]
        assert all("it ended with exit code 7" in line for line in lines)
        assert [" WARNING " in line for line in lines] == [True, True, False]
        assert " ERROR " in lines[-1]
    finally:
        process.kill()
        process.communicate()


def test_a_device_server_whose_agent_has_gone_ends_without_a_word(tmp_path: Path) -> None:
    """As when a program ends while its pool still starts."""
    listener, (ours, theirs) = socket.socket(socket.AF_UNIX), socket.socketpair()
    ours.close()
    spec = b'{"device": "cpu", "name": "x", "memory_bytes": 1048576}'
    done = subprocess.run(
        [sys.executable, "-m", "shoal.pool.node.device_server", spec,
         str(listener.fileno()), str(theirs.fileno())],
        env=commands.environment(tmp_path), pass_fds=[listener.fileno(), theirs.fileno()],
        capture_output=True, timeout=60,
    )  # fmt: skip
    listener.close()
    theirs.close()
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("ending", ["", "import os; os._exit(0)"])
def test_a_program_that_ends_while_its_pool_starts_is_quiet(ending: str) -> None:
    done = programs.run(f"import shoal; shoal.up(['{GOOD}'])\n{ending}")
    assert (done.code, done.err) == (0, "")


# --- where it listens and what it writes -----------------------


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    # A name of its own: whoever runs the tests may have a pool `default`.
    typed = ("up", "--name", f"t{os.getpid()}", "--listen", "192.0.2.1", "--device", GOOD)
    text = commands.refused(tmp_path, *typed)
    assert "--listen: cannot listen at 192.0.2.1:7433: Cannot assign requested address" in text
    done = commands.run(tmp_path, *typed)
    assert "RuntimeWarning" not in done.err
    assert len(done.err.splitlines()) == 1, done.err


def test_a_name_that_is_taken_from_another_state_directory(tmp_path: Path) -> None:
    with StandingPool(tmp_path, GOOD) as pool:
        other = tmp_path / "other"
        text = commands.refused(other, "up", "--name", pool.name, "--device", GOOD)
    assert "another pool or node of this user has the same name" in text
    assert "--name" in text


def test_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = str(tmp_path / "file" / "state")
    for arguments in (["up"], ["up", "--detach"], ["node"]):
        text = commands.refused(tmp_path, *arguments, "--device", GOOD, SHOAL_STATE=state)
        assert f"the state directory {state}/" in text
        assert "cannot be written: Not a directory" in text
        assert "export SHOAL_STATE=DIR" in text


def test_an_identity_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "shoal" / "identity.pem")
    with StandingPool(tmp_path, GOOD, listen=True) as pool:
        invitation = f"{pool.make_code()}@127.0.0.1:{pool.port}"
        text = commands.refused(tmp_path, "join", invitation, SHOAL_IDENTITY=path)
        assert commands.run(tmp_path, "join", invitation).code == 0, "the code is still good"
    assert f"{path} cannot be written: Not a directory" in text
    assert "export SHOAL_IDENTITY=FILE" in text


def test_a_head_that_is_started_again_says_when_and_why(tmp_path: Path) -> None:
    pool = StandingPool(tmp_path, GOOD)
    try:
        pid = pool.head_pid
        os.kill(pid, 9)
        pool.until_whole(1)
    finally:
        pool.process.terminate()
        err = pool.process.communicate(timeout=20)[1]
    assert " WARNING supervisor: the head has ended; it starts again: it was killed" in err
