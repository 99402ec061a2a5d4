"""A pool on three Ray nodes, used from a desk without Ray, while its parts are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pools import parts
from tests.engine.ray_hosts import OnRay, RayHosts, require_ray
from tests.support import processes
from tests.support.namespaces import Hosts
from tests.support.standing import shoal_command
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Trains on one device of a node each time it gets a lease; says what it saw, a line for each event.
TRAINER = """
    import sys, time, torch, shoal
    def train(lease):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1).to("shoal")
        step = torch.optim.SGD(model.parameters(), 1e-2)
        x = torch.randn(16, 8).to("shoal")
        print("start", lease.granted[0].info.node, time.time(), flush=True)
        while True:
            begin = time.time()
            loss = model(x).square().mean()
            step.zero_grad(); loss.backward(); step.step(); loss.item()
            took = time.time() - begin
            if took > 0.5:
                print("slow", lease.granted[0].info.node, begin, took, flush=True)
    end = time.time() + float(sys.argv[2])
    while time.time() < end:
        try:
            with shoal.connect(kind=sys.argv[1]) as lease:
                train(lease)
        except shoal.ShoalError as error:
            print("error", type(error).__name__, time.time(), str(error)[:100], flush=True)
            time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    require_ray()
    with Hosts(4) as hosts:
        made = RayHosts(hosts, tmp_path_factory.mktemp("ray"))
        try:
            made.start(0, 1, 2)
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def pool(ray: RayHosts) -> Iterator[OnRay]:
    made = OnRay(ray)
    try:
        ray.desk.shoal(*json.loads(made.told)["join"].split()[1:])
        until_devices(ray, 3)
        yield made
    finally:
        made.close()


def status(ray: RayHosts) -> dict[str, Any]:
    return dict(json.loads(ray.head.shoal("status", "--pool", "on-ray", "--json")))


def until_devices(ray: RayHosts, count: int) -> float:
    def up() -> bool:
        done = ray.desk.run(*shoal_command("devices", "--json"))
        return done.code == 0 and len(json.loads(done.out)) == count

    return wait_until(up, 60, f"the pool has {count} devices")


def test_a_client_without_ray_trains_over_devices_of_two_nodes(pool: OnRay) -> None:
    done = pool.ray.desk.python(
        """
        import os, sys, torch, shoal
        assert not [k for k in os.environ if k.startswith("RAY_")]
        def train(first, second):
            torch.manual_seed(0)
            one = torch.nn.Linear(8, 16).to(first)
            two = torch.nn.Linear(16, 1).to(second)
            step = torch.optim.SGD([*one.parameters(), *two.parameters()], 1e-2)
            x = torch.randn(16, 8).to(first)
            for _ in range(5):
                loss = two(one(x).relu().to(second)).square().mean()
                step.zero_grad(); loss.backward(); step.step()
            return loss.item()
        with shoal.connect(devices=2) as lease:
            print(len({d.info.node for d in lease.granted}))
            there = train("shoal:1", "shoal:2")
        print(abs(there - train("cpu", "cpu")) < 1e-5, "ray" in sys.modules)
        """
    )
    assert done.out == "2\nTrue False\n", done.err


def test_no_secret_of_ray_reaches_the_processes_of_the_pool(pool: OnRay) -> None:
    token = pool.ray.head.environment["RAY_AUTH_TOKEN"].encode()
    for part in parts(pool):
        for pid in [part["pid"], *processes.descendants(part["pid"])]:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert token not in environment
            assert b"RAY_" not in environment


class Trainers:
    """Two clients, each on a node of its own, beside a kill."""

    def __init__(self, pool: OnRay, seconds: float) -> None:
        self.running = [
            pool.ray.desk.start(sys.executable, "-c", textwrap.dedent(TRAINER), "cpu", str(seconds))
            for _ in range(2)
        ]
        self.nodes = [self._line(p)[1] for p in self.running]

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line, process.communicate()[1]
        return line

    def end(self) -> list[list[list[str]]]:
        """End both; return what each said since."""
        told = []
        for process in self.running:
            process.send_signal(signal.SIGINT)
            out = process.communicate(timeout=30)[0]
            told.append([line.split() for line in out.splitlines()])
        return told


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.time()


def part(pool: OnRay, name: str, node: str = "") -> dict[str, Any]:
    return next(p for p in parts(pool) if p["part"] == name and node in ("", p["node"]))


def until_head_answers(pool: OnRay, killed: int, since: float) -> float:
    """Wait for another head process; return how long there was none."""

    def answers() -> bool:
        done = pool.ray.desk.run(*shoal_command("status", "--json"))
        return done.code == 0 and json.loads(done.out)["pid"] != killed

    wait_until(answers, 60, "a head answers")
    return float(status(pool.ray)["started"]) - since


@pytest.mark.parametrize("what", ["head process", "head actor"])
def test_a_killed_head_costs_no_step(pool: OnRay, what: str) -> None:
    head = part(pool, "head")["pid"]
    trainers = Trainers(pool, 60)
    since = kill(head if what == "head process" else processes.parent(head))
    away = until_head_answers(pool, head, since)
    until_devices(pool.ray, 3)
    told = trainers.end()
    print(f"{what}: away {away:.1f} s; clients {told}")
    assert not [line for lines in told for line in lines if line[0] == "error"]
    assert away < 20


def test_a_killed_agent_comes_back_under_its_name(pool: OnRay) -> None:
    before = {(d["node"], d["number"]) for d in status(pool.ray)["devices"]}
    trainers = Trainers(pool, 60)
    victim = trainers.nodes[0]
    since = kill(processes.parent(part(pool, "agent", victim)["pid"]))
    told: list[str] = []

    def lost() -> bool:
        told[:] = Trainers._line(trainers.running[0])
        return told[0] == "error"

    wait_until(lost, 30, "the client hears of it")
    wait_until(
        lambda: {(d["node"], d["number"]) for d in status(pool.ray)["devices"]} == before
        and all(n["state"] == "up" for n in status(pool.ray)["nodes"]), 60, "the node is back"
    )  # fmt: skip
    back = part(pool, "agent", victim)["since"] - since
    print(
        f"agent actor: error after {float(told[2]) - since:.2f} s, agent again after {back:.1f} s"
    )
    assert told[1] == "DeviceLostError"
    assert not [line for line in trainers.end()[1] if line[0] == "error"]


def test_a_raylet_that_dies_takes_only_its_node(pool: OnRay) -> None:
    ray = pool.ray
    before = {(d["node"], d["number"]) for d in status(ray)["devices"]}
    node = 2
    name = next(p["node"] for p in parts(pool) if p["pid"] in _pids(ray, node))
    since = kill(ray.raylet(node))
    until_devices(ray, 2)
    print(f"raylet: two devices after {time.time() - since:.1f} s")
    wait_until(lambda: not _shoal_on(ray, node), 30, "nothing of Shoal is left on that host")
    ray.stop(node)
    ray.start(node)
    since = time.time()
    wait_until(
        lambda: {(d["node"], d["number"]) for d in status(ray)["devices"]} == before,
        60,
        "it is back",
    )
    print(f"raylet: {name} is back {time.time() - since:.1f} s after Ray runs there again")


def _pids(ray: RayHosts, node: int) -> set[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", ray.hosts[node].name], capture_output=True, text=True
    )
    return {int(word) for word in listed.stdout.split()}


def _shoal_on(ray: RayHosts, node: int) -> list[int]:
    return [
        pid
        for pid in _pids(ray, node)
        if processes.alive(pid) and any("shoal.pool" in word for word in processes.command(pid))
    ]


def test_doctor_names_the_engine_and_its_parts(pool: OnRay) -> None:
    done = pool.ray.head.run(*shoal_command("doctor", "--pool", "on-ray", "--json"))
    found = [f for f in json.loads(done.out) if f["what"] == "engine"]
    assert found[0]["text"].startswith("ray at ")
    assert "token" in found[0]["text"]
    assert len(found) == 1 + len(parts(pool))


def test_a_port_that_is_taken_is_named_and_nothing_is_left(pool: OnRay) -> None:
    """The other pool has it."""
    ray = pool.ray
    before = len(ray.of_shoal())
    done = ray.head.run(
        *shoal_command("up", "--name", "second", "--engine", "ray", "--address", ray.address),
        "--device", "cpu,memory=16MiB,threads=1",
    )  # fmt: skip
    assert done.code == 1
    assert "cannot listen at" in done.err
    wait_until(lambda: len(ray.of_shoal()) == before, 30, "nothing of the second pool is left")


def test_down_leaves_nothing(pool: OnRay) -> None:
    assert "has ended" in pool.ray.head.shoal("down", "--name", "on-ray")
    assert not [pid for node in range(3) for pid in _shoal_on(pool.ray, node)]
    listed = pool.ray.head.run(
        sys.executable, "-c",
        f"import ray; ray.init(address='{pool.ray.address}', log_to_driver=False)\n"
        "print(ray.util.list_named_actors(all_namespaces=True), ray.available_resources()['CPU'])",
    )  # fmt: skip
    assert listed.out.split() == ["[]", "12.0"], listed.err
    assert pool.ray.head.run(*shoal_command("down", "--name", "on-ray")).code == 1


def test_a_cluster_without_token_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_ray()
    with Hosts(2) as hosts:
        made = RayHosts(hosts, tmp_path_factory.mktemp("open"), token=False)
        made.machines[0].environment["RAY_AUTH_MODE"] = "disabled"
        try:
            made.start(0)
            up = ("up", "--engine", "ray", "--address", made.address, "--device", "cpu")
            done = made.head.run(*shoal_command(*up))
            assert done.code == 1
            assert "--insecure-engine" in done.err
            assert not made.of_shoal()
        finally:
            made.close()
