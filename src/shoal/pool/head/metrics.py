"""The pool's metrics in Prometheus' text format, and the small HTTP server that serves them.

On loopback it answers every program on this machine; at other addresses only peers that show a
certificate of this pool.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections import Counter
from typing import TYPE_CHECKING

from shoal.errors import PoolError, ProtocolError
from shoal.pool.base import limits
from shoal.pool.base.addresses import is_loopback, own_name
from shoal.pool.base.histogram import Histogram
from shoal.pool.head.head import Head
from shoal.pool.wire import messages, tls
from shoal.tasks.states import FINAL, State

if TYPE_CHECKING:
    import ssl

STATES = ("starting", "up", "absent", "lost")


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


class Page:
    """Collects samples by metric, as the format wants them."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(
        self, name: str, kind: str, text: str, samples: list[tuple[dict[str, str], float]]
    ) -> None:
        self._lines += [f"# HELP shoal_{name} {text}", f"# TYPE shoal_{name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
            self._lines.append(
                f"shoal_{name}{{{inside}}} {value!r}" if inside else f"shoal_{name} {value!r}"
            )

    def add_histogram(self, name: str, text: str, found: Histogram) -> None:
        self._lines += [f"# HELP shoal_{name} {text}", f"# TYPE shoal_{name} histogram"]
        self._lines += [
            f'shoal_{name}_bucket{{le="{bound}"}} {count}' for bound, count in found.buckets()
        ]
        self._lines += [f"shoal_{name}_sum {found.sum_s!r}", f"shoal_{name}_count {found.count}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def render(head: Head) -> str:
    """Return all metrics as of now."""
    status = head.status()
    page = Page()
    label = {d.number: {"device": d.name, "node": d.node, "kind": d.kind} for d in status.devices}
    page.add("up", "gauge", "The head answers.", [({}, 1)])
    page.add("start_time_seconds", "gauge", "When the head started.", [({}, status.started)])
    page.add("nodes", "gauge", "Nodes by state.", [
        ({"state": state}, sum(n.state == state for n in status.nodes)) for state in STATES
    ])  # fmt: skip
    page.add("node_up", "gauge", "Whether the node is there: 0 for one that is silent or lost.", [
        ({"node": n.name}, float(n.state in ("starting", "up")))
        for n in status.nodes
    ])  # fmt: skip
    page.add("device_memory_bytes", "gauge", "Memory that the device offers.",
             [(label[d.number], d.memory_bytes) for d in status.devices])  # fmt: skip
    page.add("device_free_bytes", "gauge", "Memory that is not leased.",
             [(label[d.number], d.free_bytes) for d in status.devices])  # fmt: skip
    page.add("device_sessions", "gauge", "Sessions on the device.",
             [(label[d.number], d.sessions) for d in status.devices])  # fmt: skip
    add_gpus(page, status.devices, label)
    used = [s for s in status.sessions if s.use is not None]

    def where(session: messages.SessionInfo) -> dict[str, str]:
        """Return the labels of a session's device, which may be away."""
        return label.get(session.device, {"device": str(session.device), "node": "", "kind": ""})

    for name, kind, text in (
        ("memory_bytes", "gauge", "Memory in use, as the session's client counts it."),
        ("calls", "counter", "Messages of the op stream."),
        ("bytes_in", "counter", "Bytes to the device."),
        ("bytes_out", "counter", "Bytes from the device."),
    ):
        suffix = "_total" if kind == "counter" else ""
        page.add(f"session_{name}{suffix}", kind, text, [
            ({"session": str(s.session), "client": s.client, **where(s)}, getattr(s.use, name))
            for s in used
        ])  # fmt: skip
    _add_queue(page, head)
    for name, value in head.counts.items():
        page.add(f"{name}_total", "counter", "Since the head started.", [({}, value)])
    if head.enrolment is not None:
        page.add("joins_refused_total", "counter", "Wrong codes since the head started.",
                 [({}, head.enrolment.refused)])  # fmt: skip
    return page.text()


def add_gpus(
    page: Page, devices: list[messages.DeviceInfo], label: dict[int, dict[str, str]]
) -> None:
    """Add what the drivers say of their GPUs."""
    for name, text, field in (
        ("used_bytes", "Memory in use on the GPU, by all programs.", "used_bytes"),
        ("utilization_ratio", "Part of the last moment in which a kernel ran.", "busy"),
        ("temperature_celsius", "Temperature of the GPU.", "celsius"),
        ("power_watts", "Power that the GPU draws.", "watts"),
    ):
        found = [(label[d.number], getattr(d.gpu, field, None)) for d in devices]
        samples = [(labels, float(value)) for labels, value in found if value is not None]
        if samples:
            page.add(f"gpu_{name}", "gauge", text, samples)


def _add_queue(page: Page, head: Head) -> None:
    """Add what waits, what runs, and how long the head takes."""
    states = Counter(entry.task.state for entry in head.tasks.lifecycle.index.tasks.values())
    page.add("tasks", "gauge", "Tasks that have not ended, by state.", [
        ({"state": state.value}, states[state]) for state in State if state not in FINAL
    ])  # fmt: skip
    waiting = head.admitting.admission.waiting
    page.add("queue_requests", "gauge", "Leases and tasks that wait for devices.",
             [({}, len(waiting))])  # fmt: skip
    page.add("queue_oldest_seconds", "gauge", "How long the oldest of them has waited.",
             [({}, head.admitting.longest_wait_s())])  # fmt: skip
    page.add_histogram(
        "queue_wait_seconds", "From a request to its devices.", head.admitting.waited
    )
    page.add_histogram(
        "request_seconds", "The head's answers, without those that wait.", head.requests.latency
    )


async def serve(head: Head, listener: socket.socket, identity: tls.Identity | None) -> None:
    """Answer GET /metrics, and nothing else."""
    context: ssl.SSLContext | None = None
    if not is_loopback(listener.getsockname()[0]):
        if identity is None:
            raise PoolError("metrics for other machines need: shoal up --listen ADDRESS")
        context = tls.server_context(identity)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(limits.FIRST_FRAME_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(respond(head, request, writer))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(
        answer,
        sock=listener,
        ssl=context,
        limit=limits.METRICS_REQUEST_BYTES_MAX,
        ssl_handshake_timeout=limits.HANDSHAKE_S if context else None,
    )
    await server.serve_forever()


def respond(head: Head, request: bytes, writer: asyncio.StreamWriter) -> bytes:
    found = writer.get_extra_info("ssl_object")
    if found is not None and head.enrolment is not None:
        peer = tls.peer_of(found)
        try:
            assert peer is not None
            head.enrolment.check(peer)
        except ProtocolError:
            return _response("403 Forbidden", "revoked\n")
    if not _host_is_ours(request, writer.get_extra_info("sockname")):
        return _response("421 Misdirected Request", "this server has another name\n")
    line = request.split(b"\r\n", 1)[0]
    if line.split(b" ")[:2] != [b"GET", b"/metrics"]:
        return _response("404 Not Found", "only GET /metrics is served\n")
    return _response("200 OK", render(head))


def _host_is_ours(request: bytes, own: tuple[str, int]) -> bool:
    """Return whether the Host is an address or localhost: a page cannot reach us by its own name."""
    found = re.findall(rb"\r\nhost:[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", request, re.IGNORECASE)
    if len(found) != 1:
        return False
    host = found[0].decode("latin-1").lower()
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name in ("localhost", socket.gethostname().lower(), own_name()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _response(status: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
