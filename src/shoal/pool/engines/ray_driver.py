"""The engine `ray`: head and agents are kept by detached actors of a Ray cluster that is there already.

This module runs in the commands of the owner, on the machine of Ray's head node, for seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from shoal.errors import LeaseError, PoolError, PoolStartError, describe
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.client.head_connection import Connection
from shoal.pool.engines import changes, engine, ray_actors
from shoal.pool.engines.engine import Event, Placed, Plan, Shape
from shoal.pool.wire import messages

#: Asks a cluster something without a token. It is refused at once where a token is needed.
_PROBE = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"shoal", namespace=b"shoal", timeout=2.0)
except Exception as error:
    print(type(error).__name__)
else:
    print("open")
"""


class RayEngine:
    def __init__(self, address: str = "") -> None:
        self._address = address or os.environ.get("RAY_ADDRESS", "") or "auto"

    def start(self, plan: Plan) -> None:
        self._connect()
        address = _gcs_address()
        wants = plan.insecure or wants_token(address)
        if not wants:
            why = (
                "takes orders from whoever reaches it"
                if wants is False
                else "may not ask for a token"
            )
            raise PoolStartError(
                f"the Ray cluster at {address} {why}. A stranger's orders would run as this user. "
                "Start Ray with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every node, or accept it: "
                "--insecure-engine"
            )
        node = _own_node()
        if "node:__internal_head__" not in node["Resources"]:
            raise PoolStartError(
                "the pool's head lives on the machine of Ray's head node, and its commands, too. Type "
                f"this there: {address}"
            )
        if _head_actor(plan.pool) is not None:
            raise PoolStartError(
                f"{plan.pool} runs already on Ray. See it with `shoal status`, end it with "
                "`shoal down`, or start another with --name."
            )
        engine.choose(plan.pool, engine.Chosen("ray", address))
        try:
            actor = _make_head_actor(plan, str(node["NodeManagerAddress"]))
            self._until_ready(plan.pool, actor)
        except BaseException:
            self.stop(plan.pool)
            raise

    def stop(self, pool: str) -> bool:
        try:
            self._connect()
        except PoolError:
            if _reachable(self._address):
                raise
            engine.forget(pool)  # actors end with their cluster, and all of the pool with them
            return False
        actor = _head_actor(pool)
        if actor is not None:
            with suppress(RayError):  # it restarts just now: what is left is ended below
                ray.get(actor.stop.remote(), timeout=limits.ENGINE_STOP_S)
        left = _actors_of(pool)
        for name in left:
            with suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=ray_actors.NAMESPACE), no_restart=True)
        deadline = time.monotonic() + limits.ENGINE_STOP_S
        while _actors_of(pool) or _answers(pool):
            if time.monotonic() > deadline:
                raise PoolError(
                    f"Ray has not ended {', '.join(_actors_of(pool)) or 'the head'} in "
                    f"{limits.ENGINE_STOP_S:g} s. See: ray list actors"
                )
            time.sleep(limits.RETRY_S)
        engine.forget(pool)
        return bool(left)

    def list(self, pool: str) -> list[Placed]:
        self._connect()
        actor = _head_actor(pool)
        if actor is None:
            return []
        try:
            rows = ray.get(actor.list.remote(), timeout=limits.ENGINE_CALL_S)
        except RayError as error:
            return [Placed("head", "", 0, 0.0, 0, f"Ray has no answer of it: {describe(error)}")]
        return [Placed(*row) for row in rows]

    def watch(self, pool: str) -> Iterator[Event]:
        return changes.watch(lambda: self.list(pool))

    def want(self, pool: str, shapes: Sequence[Shape], until: float) -> str:
        return ""  # a waiting request does not grow the cluster yet

    def without_agent(self, pool: str) -> dict[str, str]:
        """Return why nodes of the cluster have no agent."""
        self._connect()
        actor = _head_actor(pool)
        if actor is None:
            return {}
        found = ray.get(actor.nodes_without.remote(), timeout=limits.ENGINE_CALL_S)
        return dict(found)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            ray.init(
                address=self._address, namespace=ray_actors.NAMESPACE, log_to_driver=False,
                logging_level="ERROR", configure_logging=False,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, RayError, OSError) as error:
            where = "here" if self._address == "auto" else f"at {self._address}"
            raise PoolError(
                f"no Ray cluster answers {where}: {describe(error)[:400]}. Is it up (ray status), and "
                "is its token in RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token?"
            ) from None

    def _until_ready(self, pool: str, actor: Any) -> None:
        """Wait for the head and the first agent. Raise with the reasons if they do not come."""
        deadline = time.monotonic() + limits.ENGINE_START_S
        parts: list[Placed] = []
        while time.monotonic() < deadline and not _hopeless(parts):
            with suppress(RayError):  # the actor itself is starting
                rows = ray.get(actor.list.remote(), timeout=limits.ENGINE_CALL_S)
                parts = [Placed(*row) for row in rows]
            ready = {p.part for p in parts if p.pid and not p.problem.startswith("it is")}
            if {"head", "agent"} <= ready and _agent_up(pool):
                return
            time.sleep(limits.RETRY_S)
        reasons = "; ".join(f"{p.part} on {p.node}: {p.problem or 'runs'}" for p in parts)
        if not any(p.part == "agent" for p in parts):
            why = self.without_agent(pool)
            reasons += "; no node is fit: " + "; ".join(f"{n}: {r}" for n, r in why.items())
        raise PoolStartError(f"the pool was not ready in time: {reasons or 'Ray runs no actor'}")


def _hopeless(parts: list[Placed]) -> bool:
    """Return whether the head has failed to start so often that it would fail for ever."""
    failing = (p for p in parts if p.part == "head" and "did not start" in p.problem)
    return any(p.restarts + 1 >= limits.START_ATTEMPTS_MAX for p in failing)


def wants_token(address: str) -> bool | None:
    """Return whether a cluster refuses those without its token; None: that is not known."""
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address], env={**quiet, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limits.ENGINE_PROBE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    said = done.stdout.strip()
    return {"open": False, "AuthenticationError": True}.get(said)


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _own_node() -> dict[str, Any]:
    mine = ray.get_runtime_context().get_node_id()
    return next(dict(node) for node in ray.nodes() if node["NodeID"] == mine)


def _head_actor(pool: str) -> Any:
    try:
        return ray.get_actor(ray_actors.head_name(pool), namespace=ray_actors.NAMESPACE)
    except ValueError:
        return None


def _actors_of(pool: str) -> list[str]:
    return [
        str(known["name"])
        for known in ray.util.list_named_actors(all_namespaces=True)
        if known["namespace"] == ray_actors.NAMESPACE and known["name"].startswith(f"{pool}/")
    ]


def _make_head_actor(plan: Plan, address: str) -> Any:
    head = msgspec.structs.replace(plan.head, listen_host=address)
    order = ray_actors.HeadOrder(
        plan.pool, address, str(paths.state_directory(plan.pool)), head, plan.agent, plan.per_node
    )
    return (
        ray.remote(ray_actors.HeadActor)
        .options(
            name=ray_actors.head_name(plan.pool), namespace=ray_actors.NAMESPACE,
            lifetime="detached", max_restarts=-1, max_task_retries=0, num_cpus=0,
            resources={"node:__internal_head__": 0.001}, max_concurrency=8,
        )
        .remote(msgspec.json.encode(order).decode())
    )  # fmt: skip


def _agent_up(pool: str) -> bool:
    try:
        with Connection(LOCAL_PREFIX + paths.local_pool_id(pool), limits.ENGINE_CALL_S) as head:
            found = head.ask(messages.AskStatus(), limits.ENGINE_CALL_S)
    except LeaseError:
        return False
    return isinstance(found, messages.PoolStatus) and any(n.state == "up" for n in found.nodes)


def _answers(pool: str) -> bool:
    try:
        Connection(LOCAL_PREFIX + paths.local_pool_id(pool), limits.ENGINE_CALL_S).close()
    except LeaseError:
        return False
    return True


def _reachable(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=limits.CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
