"""A node that vanishes is named by every command and metric, until it is back or thrown out."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

from tests.support import commands
from tests.support.standing import StandingPool, free_port, shoal_command
from tests.support.waiting import wait_until

DEVICE = "cpu,memory=16MiB,threads=1"
NAME = f"t-lost-{os.getpid()}"  # no other node of this user has it


def start_node(home: Path, *join: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        shoal_command("node", "--name", NAME, "--no-profile", "--device", DEVICE, "--json", *join),
        env=commands.environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline(), process.communicate()[1]
    return process


def test_a_lost_node_is_named_until_it_is_back_or_thrown_out(tmp_path: Path) -> None:
    port = free_port()
    with StandingPool(tmp_path, DEVICE, listen=True, options=("--metrics", str(port))) as pool:

        def state() -> str:
            return next((n.state for n in pool.status().nodes if n.name == "away"), "")

        def metrics() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                return str(page.read().decode())

        invitation = f"{pool.make_code('node')}@127.0.0.1:{pool.port}"
        node = start_node(tmp_path / "away", "--join", invitation, "--as", "away")
        wait_until(lambda: state() == "up", 30, "the node is up")
        assert 'shoal_node_up{node="away"} 1.0' in metrics()
        os.kill(node.pid, signal.SIGKILL)
        node.communicate()
        wait_until(lambda: state() == "lost", 30, "the node is lost")
        assert "node away is lost, last heard" in pool.run("status", "--pool", pool.name).out
        doctor = pool.run("doctor", SHOAL_POOL=pool.url)
        assert doctor.code == 1
        assert "away is lost, last heard" in doctor.out
        assert "shoal revoke away" in doctor.out
        assert 'shoal_node_up{node="away"} 0.0' in metrics()
        assert 'shoal_nodes{state="lost"} 1' in metrics()
        node = start_node(tmp_path / "away")
        try:
            wait_until(lambda: state() == "up", 30, "the node is back")
            assert 'shoal_node_up{node="away"} 1.0' in metrics()
        finally:
            os.kill(node.pid, signal.SIGKILL)
            node.communicate()
        wait_until(lambda: state() == "lost", 30, "the node is lost again")
        assert pool.run("revoke", "away", "--name", pool.name).code == 0
        assert state() == "", "a node that was thrown out is not missed"
