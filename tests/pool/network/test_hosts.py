"""Three hosts on one machine: a head, a node that joins it, and a client elsewhere."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.cluster import Cluster
from tests.support.namespaces import Hosts
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until

HOLDER = """
    import sys
    from shoal.pool.client.head_connection import ask, default_url
    from shoal.pool.wire import messages
    connection, lease = ask(default_url(), messages.AskLease(1, 1 << 20, [], kind="far"))
    print(lease.devices[0].info.name, lease.devices[0].network.host, flush=True)
    sys.stdin.readline()
    message = connection.receive(5)
    print(message.parts == [lease.devices[0].part], message.end.text, flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(3)
    with made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One line at the node, one line at the desk: any of the tests may be the first."""
    made = Cluster(hosts.hosts, tmp_path_factory.mktemp("cluster"))
    try:
        made.desk.shoal(*made.join_line.split()[1:])
        yield made
    finally:
        made.close()


def test_from_nothing_to_another_host(cluster: Cluster) -> None:
    """The devices of both hosts are seen."""
    assert len(cluster.join_line) < 80
    found = json.loads(cluster.desk.shoal("devices", "--json"))
    assert [(d["name"], d["node"] == "faraway") for d in found] == [("near", False), ("far", True)]
    checks = json.loads(cluster.desk.shoal("doctor", "--json"))
    assert {c["what"]: c["state"] for c in checks}["port"] == "good"


TRAINING = """
    import torch, shoal
    from transformers import GPT2Config, GPT2LMHeadModel

    def train(device):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=101, n_positions=32,
                            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        model = GPT2LMHeadModel(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tokens = torch.randint(101, (4, 32)).to(device)
        losses = []
        for _ in range(4):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    with shoal.connect(kind="far") as lease:
        there = train("shoal")
    print(torch.allclose(torch.tensor(there), torch.tensor(train("cpu")), rtol=1e-4))
    print(there[-1] < there[0])
"""


def test_a_gpt_trains_on_another_host(cluster: Cluster) -> None:
    done = cluster.desk.python(TRAINING)
    assert done.out == "True\nTrue\n", done.err


def test_devices_of_two_hosts_are_one_lease_of_a_third(cluster: Cluster) -> None:
    """Copies go from worker to worker; the client's own counters show that none came through it."""
    done = cluster.desk.python(
        """
        import shoal, torch
        with shoal.connect(devices=2, memory="24MiB") as lease:
            assert {d.info.name for d in lease.granted} == {"near", "far"}
            x = torch.arange(1 << 20)
            first = x.to("shoal:1")
            torch.shoal.synchronize()
            before = torch.shoal.traffic()
            for i in range(5):
                second = first.to("shoal:2")
                first += 1
            second = second.to("shoal:1")
            torch.shoal.synchronize()
            after = torch.shoal.traffic()
            print(after["bytes_peer"] - before["bytes_peer"] == 6 * x.nbytes)
            print(after["bytes_in"] == before["bytes_in"], after["bytes_out"] == before["bytes_out"])
            print(torch.equal(second.cpu(), x + 4), torch.equal(first.cpu(), x + 5))
        """
    )
    assert done.out == "True\nTrue True\nTrue True\n", done.err


def test_what_comes_from_another_host_comes_while_the_device_computes(cluster: Cluster) -> None:
    """Also behind a copy that is never made, because its target could not be made."""
    done = cluster.desk.python(
        """
        import shoal, torch
        with shoal.connect(devices=2, memory="24MiB") as lease:
            parts = [torch.full((1 << 17,), float(i)).to("shoal:2") for i in range(8)]
            busy = torch.ones(512, 512, device="shoal:1")
            torch.shoal.synchronize()
            for _ in range(100):
                busy = torch.tanh(busy @ busy)
            came = [part.to("shoal:1") for part in parts]
            sums = [c.sum() for c in came]
            print([s.item() for s in sums] == [float(i << 17) for i in range(8)])
            counted = shoal.memory.counters()
            print(0 < counted.peer_ahead_bytes <= counted.peer_bytes == 8 << 19)

            table = torch.zeros(4, 1 << 15, device="shoal:1")
            for _ in range(100):
                busy = torch.tanh(busy @ busy)
            lost = table[torch.tensor([9], device="shoal:1")][0]  # there is no such row
            lost.copy_(parts[1][: 1 << 15])
            after = parts[2].to("shoal:1")
            try:
                torch.shoal.synchronize()
            except IndexError:
                print("IndexError")
            print(torch.equal(after.cpu(), parts[2].cpu()))
        """
    )
    assert done.out == "True\nTrue\nIndexError\nTrue\n", done.out + done.err


LOSER = """
    import sys, time, torch, shoal
    lease = shoal.connect(kind="far", memory="8MiB")
    x = torch.ones(1000, device="shoal")
    print(lease.worker_pids[0], flush=True)
    sys.stdin.readline()
    try:
        while True:
            x.add_(1).sum().item()
    except shoal.DeviceLostError as lost:
        print(lease.number, f"was lost: {lease.end_reason}. Call" in str(lost), flush=True)
        print(lease.end_reason, flush=True)
    sys.stdin.readline()
    mended = time.monotonic()
    while True:  # the kernel takes a moment to find its neighbours again
        try:
            lease = shoal.connect(kind="far", memory="8MiB")
            break
        except shoal.LeaseError:
            if time.monotonic() - mended > 60:
                raise
    print(torch.ones(3, device="shoal").sum().item(), flush=True)
"""


@pytest.mark.parametrize("cut_s", [0, pytest.param(10, marks=pytest.mark.slow)])
def test_a_cut_cable_is_a_lost_device_and_never_two_owners(
    cluster: Cluster, hosts: Hosts, cut_s: int
) -> None:
    """The client hears it by name; the worker ends too; when the cable is mended, all is as before.

    The cable stays cut until both have noticed, and for `cut_s` at least.
    """
    loser = cluster.desk.start(sys.executable, "-c", textwrap.dedent(LOSER))
    assert loser.stdout is not None
    assert loser.stdin is not None
    worker = int(loser.stdout.readline())
    desk = hosts.hosts[2]
    hosts.cut(desk)
    end = time.monotonic() + cut_s
    try:
        loser.stdin.write("go\n")
        loser.stdin.flush()
        lease, same = loser.stdout.readline().split()
        assert same == "True"
        reason = loser.stdout.readline().strip()
        assert reason == "the network between client and device went silent"
        wait_until(lambda: not processes.alive(worker), 30, "the worker has noticed too")

        def ended() -> list[str]:
            log = json.loads(cluster.head.shoal("audit", "--json"))
            return [
                e["detail"]
                for e in log
                if e["action"] == "end" and e["detail"].startswith(f"lease {lease}:")
            ]

        wait_until(lambda: bool(ended()), 30, "the audit log has the end")
        assert ended()[0].endswith(reason)
        wait_until(lambda: time.monotonic() > end, cut_s + 1, "the cable was cut for long enough")
        sessions = json.loads(cluster.head.shoal("status", "--json"))["sessions"]
        assert len(sessions) <= 1  # the lost lease, if its time to come back is not over
    finally:
        hosts.mend(desk)
    loser.stdin.write("go\n")
    loser.stdin.flush()
    out, err = loser.communicate(timeout=60)
    assert out == "3.0\n", err


def test_each_host_measures_its_own_devices(cluster: Cluster) -> None:
    """The client sees how fast the devices of all hosts are."""

    def profiles() -> list[dict[str, object] | None]:
        return [d["profile"] for d in json.loads(cluster.desk.shoal("devices", "--json"))]

    wait_until(lambda: all(profiles()), 60, "the devices of both hosts are measured")
    refused = cluster.desk.run(*shoal_command("devices", "--refresh"))
    assert refused.code == 1
    assert "needs the role admin" in refused.err


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
        holder.communicate(timeout=60)

    def both() -> bool:
        return len(json.loads(cluster.head.shoal("devices", "--json"))) == 2

    wait_until(both, 30, "the node is back")


def test_a_revoked_node_is_out(cluster: Cluster) -> None:
    cluster.head.shoal("revoke", "faraway")
    assert len(json.loads(cluster.head.shoal("devices", "--json"))) == 1
    audit = json.loads(cluster.head.shoal("audit", "--json"))
    assert {"join", "revoke", "node lost"} <= {e["action"] for e in audit}
