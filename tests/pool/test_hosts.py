"""Three hosts on one machine: a head, a node that joins it, and a client elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes, programs
from tests.support.namespaces import Host, Hosts
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until

HOLDER = """
    import sys
    from shoal.pool import client, messages
    connection, lease = client.ask(client.default_url(), messages.AskLease(1, 1 << 20, [], kind="far"))
    print(lease.devices[0].info.name, lease.devices[0].network.host, flush=True)
    sys.stdin.readline()
    message = connection.receive(5)
    print(message.parts == [lease.devices[0].part], message.reason, flush=True)
"""


class Machine:
    """A host with a home of its own."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        self.directory = directory
        self.environment = programs.environment(
            HOME=str(directory), SHOAL_STATE=str(directory / "state"),
            SHOAL_IDENTITY=str(directory / "identity.pem"),
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.host.command(*words), env=self.environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str) -> programs.Outcome:
        done = self.start(*words)
        out, err = done.communicate(timeout=100)
        return programs.Outcome(done.returncode, out, err)

    def shoal(self, *arguments: str) -> str:
        done = self.run(*shoal_command(*arguments))
        assert done.code == 0, done.out + done.err
        return done.out

    def python(self, source: str) -> programs.Outcome:
        return self.run(sys.executable, "-c", textwrap.dedent(source))


class Cluster:
    """head: `shoal up --listen`; node: `shoal node --join`; desk: `shoal join`."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        machines = []
        for host, name in zip(hosts, ("head", "node", "desk"), strict=True):
            (directory / name).mkdir()
            machines.append(Machine(host, directory / name))
        self.head, self.node, self.desk = machines
        self.up = self.head.start(
            *shoal_command("up", "--json", "--listen", hosts[0].address,
                           "--device", "cpu,memory=32MiB,threads=1,name=near,kind=near")
        )  # fmt: skip
        assert self.up.stdout is not None
        line = self.up.stdout.readline()
        assert line, self.up.communicate()[1]
        self.join_line = json.loads(line)["join"]
        command = json.loads(self.head.shoal("code", "--node", "--json"))["command"]
        self.agent = self.node.start(
            *shoal_command(*command.split()[1:], "--as", "faraway", "--json",
                           "--device", "cpu,memory=32MiB,threads=1,name=far,kind=far")
        )  # fmt: skip
        assert self.agent.stdout is not None
        assert self.agent.stdout.readline(), self.agent.communicate()[1]

    def close(self) -> None:
        for process in (self.agent, self.up):
            pids = [process.pid, *processes.descendants(process.pid)]
            process.terminate()
            process.communicate(timeout=20)
            wait_until(lambda p=pids: not any(map(processes.alive, p)), 5, "nothing is left")  # type: ignore[misc]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(3)
    with made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(hosts.hosts, tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        made.close()


def test_from_nothing_to_another_host(cluster: Cluster) -> None:
    """One line there, one line here; the devices of both hosts are seen."""
    assert len(cluster.join_line) < 80
    cluster.desk.shoal(*cluster.join_line.split()[1:])
    found = json.loads(cluster.desk.shoal("devices", "--json"))
    assert [(d["name"], d["node"] == "faraway") for d in found] == [("near", False), ("far", True)]
    checks = json.loads(cluster.desk.shoal("doctor", "--json"))
    assert {c["what"]: c["state"] for c in checks}["port"] == "good"


def test_tensors_do_not_cross_hosts_yet_and_the_error_says_so(cluster: Cluster) -> None:
    """The lease is granted, the door of the device server opens; then the data plane is missing."""
    done = cluster.desk.python("import shoal; shoal.connect(kind='far')")
    assert done.code == 1
    assert "LeaseError" in done.err
    assert "does not move tensors between machines yet" in done.err


def test_each_host_measures_its_own_devices(cluster: Cluster) -> None:
    """The client has joined above; it sees how fast the devices of all hosts are."""

    def profiles() -> list[dict[str, object] | None]:
        return [d["profile"] for d in json.loads(cluster.desk.shoal("devices", "--json"))]

    wait_until(lambda: all(profiles()), 60, "the devices of both hosts are measured")
    refused = cluster.desk.run(*shoal_command("devices", "--refresh"))
    assert refused.code == 1
    assert "only the pool's owner" in refused.err


@pytest.mark.slow
def test_a_client_on_the_nodes_own_machine_works(cluster: Cluster) -> None:
    command = json.loads(cluster.head.shoal("code", "--json"))["command"]
    cluster.node.shoal(*command.split()[1:])
    done = cluster.node.python(
        """
        import shoal, torch
        lease = shoal.connect(kind="far")
        print(torch.ones(3, device="shoal").sum().item(), lease.granted[0].info.node)
        """
    )
    assert done.out == "3.0 faraway\n", done.err


def test_a_node_that_vanishes_is_noticed_within_five_seconds(
    cluster: Cluster, hosts: Hosts
) -> None:
    holder = cluster.desk.start(sys.executable, "-c", textwrap.dedent(HOLDER))
    assert holder.stdout is not None
    assert holder.stdin is not None
    node = hosts.hosts[1]
    assert holder.stdout.readline() == f"far {node.address}\n"
    hosts.cut(node)
    try:
        holder.stdin.write("go\n")
        holder.stdin.flush()
        known, _, reason = holder.stdout.readline().partition(" ")
        assert known == "True"
        assert "node faraway has not been heard of" in reason
    finally:
        hosts.mend(node)
        holder.communicate(timeout=20)

    def both() -> bool:
        return len(json.loads(cluster.head.shoal("devices", "--json"))) == 2

    wait_until(both, 20, "the node is back")


def test_a_revoked_node_is_out(cluster: Cluster) -> None:
    cluster.head.shoal("revoke", "faraway")
    assert len(json.loads(cluster.head.shoal("devices", "--json"))) == 1
    audit = json.loads(cluster.head.shoal("audit", "--json"))
    assert {"join", "revoke", "node lost"} <= {e["action"] for e in audit}
