"""The two kinds of actors that Ray keeps for a pool: one with the head, one on each node with an agent.

Each is a thin parent of a process that knows nothing of Ray. Rules, each because of a fault that was
seen: a constructor neither raises nor waits, for Ray would give the actor up for good; no secret is an
argument or a result, for Ray keeps these in the clear; no call is tried again on a restarted actor.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import PoolError, describe
from shoal.pool.access import certificates
from shoal.pool.base import limits, log, paths
from shoal.pool.base.addresses import LOCAL_PREFIX, NETWORK_PREFIX, join_address
from shoal.pool.client.head_connection import Connection
from shoal.pool.engines import placer
from shoal.pool.engines.kept import Kept
from shoal.pool.local import agent_process, head_process
from shoal.pool.local.supervisor import Lock, Supervised
from shoal.pool.node.spec import parse_device
from shoal.pool.wire import messages, tls

NAMESPACE = "shoal"
Part = tuple[str, str, int, float, int, str]  # the fields of `engine.Placed`


class HeadOrder(msgspec.Struct, frozen=True):
    """The argument of a `HeadActor`, as JSON."""

    pool: str
    address: str  # of its node
    lock: str  # the pool's state directory on that node
    head: head_process.Options
    agent: agent_process.Options
    per_node: placer.PerNode


class AgentOrder(msgspec.Struct, frozen=True):
    """The argument of an `AgentActor`, as JSON."""

    pool: str
    url: str  # of the head
    placement: placer.Placement
    agent: agent_process.Options


def head_name(pool: str) -> str:
    return f"{pool}/head"


def agent_name(pool: str, node_id: str) -> str:
    return f"{pool}/agent/{node_id}"


def environment() -> dict[str, str]:
    """Return this process's environment without what is Ray's: its token above all."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}


def spare_from_oom_killer() -> str:
    """Take back that Ray makes its workers, and so their children, the kernel's first choice. Return
    what to know if that is not allowed."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) > 0:
                file.seek(0)
                file.write("0")
    except OSError:
        return "the kernel ends it first when the machine is out of memory (oom_score_adj of Ray)"
    return ""


class AgentActor:
    """Keeps the agent of its node. Ray restarts it on that node, and never elsewhere."""

    def __init__(self, order: str) -> None:
        self._order = msgspec.json.decode(order, type=AgentOrder)
        log.set_up(f"engine[{self._order.placement.name}]")
        self._note = spare_from_oom_killer()
        self._name = self._order.placement.name  # in the pool
        one = Supervised("agent", agent_process.__name__, "", environment=environment())
        self._kept = Kept(one, self._prepare)

    def describe(self) -> Part:
        kept = self._kept
        problem = kept.problem or self._note
        return "agent", self._name, kept.pid, kept.since, kept.restarts, problem

    def place(self) -> str:
        return msgspec.json.encode(self._order.placement).decode()

    def stop(self) -> None:
        self._kept.stop()

    def _prepare(self, one: Supervised) -> None:
        import ray

        order, place = self._order, self._order.placement
        state = paths.state_directory(order.pool) / "agent"
        paths.make_directory(state)
        key = certificates.new_key()
        head = ray.get_actor(head_name(order.pool), namespace=NAMESPACE)
        asked = head.enrol.remote(place.name, certificates.request_pem(key))
        name, certificate, authority = ray.get(asked, timeout=limits.ENGINE_CALL_S)
        identity = tls.Identity(
            state / "node.pem", name, "node", order.url, certificates.key_pem(key),
            certificate, authority,
        )  # fmt: skip
        identity.save()
        self._name = name
        gpus = [f"cuda:{number}" for number in range(place.gpus)]  # Ray hides the others
        options = msgspec.structs.replace(
            order.agent, node=name, devices=[*gpus, *place.devices], host=place.address,
            identity=str(identity.path), head=order.url,
            profiles=str(state / "profiles.json") if order.agent.profiles else "",
        )  # fmt: skip
        one.options = msgspec.json.encode(options).decode()


class HeadActor:
    """Keeps the head, and an agent actor on each node that is fit."""

    def __init__(self, order: str) -> None:
        self._order = msgspec.json.decode(order, type=HeadOrder)
        log.set_up("engine")
        self._note = spare_from_oom_killer()
        self._lock: Lock | None = None
        self._agents: dict[str, Any] = {}  # by node id: its actor
        self._places: dict[str, placer.Placement] = {}
        self._without: dict[str, str] = {}
        self._placing = ""  # why agents cannot be placed
        self._guard = threading.Lock()
        self._stopping = threading.Event()
        options = msgspec.json.encode(self._order.head).decode()
        one = Supervised("head", head_process.__name__, options, environment=environment())
        self._kept = Kept(one, self._prepare)
        self._placer = threading.Thread(target=self._place_agents, name="placer", daemon=True)
        self._placer.start()

    def _prepare(self, one: Supervised) -> None:
        if self._lock is None:
            self._lock = Lock(Path(self._order.lock))
        paths.make_directory(Path(self._order.head.state))

    # --- calls -------------------------------------------------------------------------------------

    def enrol(self, name: str, request: str) -> tuple[str, str, str]:
        """Return name, certificate and authority for an agent: nothing of this is secret."""
        url = LOCAL_PREFIX + paths.local_pool_id(self._order.pool)
        with Connection(url, limits.ENGINE_CALL_S) as head:
            answer = head.ask(messages.EnrolNode(name, request))
        if not isinstance(answer, messages.NodeEnrolled):
            raise PoolError(f"the head answered {type(answer).__name__} to EnrolNode")
        return answer.name, answer.certificate, answer.authority

    def list(self) -> list[Part]:
        """Return head and agents."""
        import ray

        with self._guard:
            agents = [(self._places[i], actor) for i, actor in self._agents.items()]
        asked = [actor.describe.remote() for _, actor in agents]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=limits.ENGINE_PARTS_S)
        parts = [_answer(answer, place) for (place, _), answer in zip(agents, asked, strict=True)]
        mine = self._order.address
        names = [
            part[1] for (place, _), part in zip(agents, parts, strict=True) if place.address == mine
        ]
        kept = self._kept
        problem = kept.problem or self._placing or self._note
        head = ("head", (names or [mine])[0], kept.pid, kept.since, kept.restarts, problem)
        return [head, *parts]

    def nodes_without(self) -> dict[str, str]:
        """Return why nodes have no agent."""
        return self._without

    def stop(self) -> None:
        """End agents and head. Return when no process of theirs is left."""
        import ray

        self._stopping.set()
        self._placer.join(limits.ENGINE_CALL_S)
        with self._guard:
            agents = list(self._agents.values())
        asked = [actor.stop.remote() for actor in agents]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=limits.STOP_S)
        for actor in agents:
            ray.kill(actor, no_restart=True)
        self._kept.stop()

    # --- placing -----------------------------------------------------------------------------------

    def _place_agents(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
                self._placing = ""
            except Exception as error:  # Ray's own, of any kind: the next look may go well
                self._placing = f"agents cannot be placed: {describe(error)}"
            self._stopping.wait(limits.ENGINE_LOOK_S)

    def _look(self) -> None:
        import ray

        self._recover()
        nodes = [
            placer.EngineNode(
                node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"],
                int(node["Resources"].get("GPU", 0)), dict(node.get("Labels", {})),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]  # fmt: skip
        names_file = Path(self._order.lock) / "ray_nodes.json"
        names: dict[str, str] = {}
        with suppress(FileNotFoundError):
            names = msgspec.json.decode(names_file.read_bytes(), type=dict[str, str])
        decision = placer.decide(nodes, set(self._agents), names, self._order.per_node)
        self._without = decision.without
        if decision.names != names:
            paths.write_private(names_file, msgspec.json.encode(decision.names).decode())
        for node_id in decision.end:
            with self._guard:
                actor = self._agents.pop(node_id)
                self._places.pop(node_id)
            ray.kill(actor, no_restart=True)  # Ray would wait for its node for ever
        for place in decision.start:
            self._start(place)

    def _recover(self) -> None:
        """Find the agents of an earlier head actor."""
        import ray

        if self._agents:
            return
        begin = agent_name(self._order.pool, "")
        for known in ray.util.list_named_actors(all_namespaces=True):
            if known["namespace"] == NAMESPACE and known["name"].startswith(begin):
                with suppress(ValueError):  # it has just ended
                    actor = ray.get_actor(known["name"], namespace=NAMESPACE)
                    place = ray.get(actor.place.remote(), timeout=limits.ENGINE_CALL_S)
                    node_id = known["name"].removeprefix(begin)
                    with self._guard:
                        self._agents[node_id] = actor
                        self._places[node_id] = msgspec.json.decode(place, type=placer.Placement)

    def _start(self, place: placer.Placement) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        url = NETWORK_PREFIX + join_address(self._order.address, self._order.head.listen_port)
        order = AgentOrder(self._order.pool, url, place, self._order.agent)
        actor = (
            ray.remote(AgentActor)
            .options(
                name=agent_name(self._order.pool, place.node_id), namespace=NAMESPACE,
                lifetime="detached", get_if_exists=True, max_restarts=-1, max_task_retries=0,
                num_cpus=cpus(place.devices), num_gpus=place.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
            )
            .remote(msgspec.json.encode(order).decode())
        )  # fmt: skip
        with self._guard:
            self._agents[place.node_id] = actor
            self._places[place.node_id] = place


def cpus(devices: tuple[str, ...]) -> int:
    """Return the CPUs of Ray that these CPU devices hold."""
    return sum(parse_device(text).threads or 1 for text in devices)


def _answer(answer: Any, place: placer.Placement) -> Part:
    import ray

    try:
        part: Part = ray.get(answer, timeout=0)
        return part
    except ray.exceptions.GetTimeoutError:
        wanted = f"{place.gpus} GPU(s) and {cpus(place.devices)} CPU(s)"
        return (
            "agent",
            place.name,
            0,
            0.0,
            0,
            f"Ray does not run it yet: it holds {wanted} there when they are free",
        )
    except ray.exceptions.RayError as error:
        return "agent", place.name, 0, 0.0, 0, describe(error)
