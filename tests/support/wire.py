"""Every message of the control plane: for tests that send what does not belong to a link."""

from __future__ import annotations

import typing

import msgspec
from msgspec.msgpack import Decoder

from shoal.pool.node import orders
from shoal.pool.wire import (
    data_messages,
    join_messages,
    messages,
    node_messages,
    runner_messages,
    session_messages,
    share_messages,
)

#: Each direction of each link: a union of kinds, and its decoder.
LINKS: dict[str, tuple[typing.Any, Decoder[typing.Any]]] = {
    "client to head": (messages.FromClient, messages.FROM_CLIENT),
    "head to client": (messages.FromHead, messages.FROM_HEAD),
    "first to head": (join_messages.FirstMessage, join_messages.FIRST),
    "head to newcomer": (join_messages.FromHead, join_messages.FROM_HEAD),
    "node to head": (node_messages.FromNode, node_messages.FROM_NODE),
    "head to node": (node_messages.FromHead, node_messages.FROM_HEAD),
    "device server to agent": (node_messages.FromServer, node_messages.FROM_SERVER),
    "agent to device server": (node_messages.ToServer, node_messages.TO_SERVER),
    "local client to device server": (session_messages.Hello, session_messages.HELLO),
    "remote client to device server": (session_messages.FromRemote, session_messages.FROM_REMOTE),
    "device server to remote client": (session_messages.FromServer, session_messages.FROM_SERVER),
    "device server to its child": (orders.Order, orders.ORDER),
    "child to device server": (orders.FromChild, orders.FROM_CHILD),
    "client to worker": (session_messages.Peers, session_messages.PEERS),
    "worker to client": (session_messages.FromWorker, session_messages.FROM_WORKER),
    "reader's start to client": (session_messages.FromReader, session_messages.FROM_READER),
    "client to agent": (share_messages.FromClient, share_messages.FROM_CLIENT),
    "agent to client": (share_messages.FromAgent, share_messages.FROM_AGENT),
    "client to reader": (data_messages.FromClient, data_messages.FROM_CLIENT),
    "runner to head": (runner_messages.FromRunner, runner_messages.FROM_RUNNER),
    "head to runner": (runner_messages.ToRunner, runner_messages.TO_RUNNER),
    "attempt process to runner": (runner_messages.FromAttempt, runner_messages.FROM_ATTEMPT),
    "runner to attempt process": (runner_messages.ToAttempt, runner_messages.TO_ATTEMPT),
    "reader to client": (data_messages.FromReader, data_messages.FROM_READER),
}


def kinds(union: typing.Any) -> tuple[type[msgspec.Struct], ...]:
    return typing.get_args(union) or (union,)


KINDS: tuple[type[msgspec.Struct], ...] = tuple(
    dict.fromkeys(kind for union, _ in LINKS.values() for kind in kinds(union))
)
ANY: Decoder[typing.Any] = Decoder(typing.Union[KINDS])  # noqa: UP007
