"""The head of a standing pool, as a process of its own, which `shoal up` keeps running."""

from __future__ import annotations

import asyncio
import asyncio.sslproto as sslproto
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from shoal.errors import PoolStartError, ShoalError
from shoal.pool.access import codes
from shoal.pool.base import limits, log, paths, process
from shoal.pool.base.addresses import family, join_address
from shoal.pool.head import metrics
from shoal.pool.head.head import Head
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.store import Store
from shoal.pool.wire import tls
from shoal.pool.wire.channel import Listener
from shoal.tasks.rules import DEFAULT

_log = logging.getLogger(__name__)


class Options(msgspec.Struct):
    pool: str
    state: str  # directory
    listen_host: str = ""  # "": this machine only
    listen_port: int = 0
    metrics_host: str = ""
    metrics_port: int = 0  # 0: none
    rule: str = DEFAULT  # of admission


def _listen(option: str, host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family(host), backlog=256)
    except OSError as error:
        number = error.errno or 0  # below 0: of a name that cannot be resolved
        reason = os.strerror(number) if number > 0 else str(error.strerror)
        help_text = "Name another port"
        if error.errno != errno.EADDRINUSE:
            help_text = "Name an address of this machine (ip addr lists them), or 0.0.0.0 for all"
        raise PoolStartError(
            f"{option}: cannot listen at {join_address(host, port)}: {reason}. {help_text}"
        ) from None


def make_head(options: Options) -> tuple[Head, tls.Identity | None]:
    """Return the head with its state and, if it listens, its identity."""
    state = Path(options.state)
    store = Store(state / "pool.db")
    table = LeaseTable()
    identity = enrolment = None
    if options.listen_host:
        from shoal.pool.access.certificates import Authority
        from shoal.pool.head.enrolment import Enrolment

        authority = Authority.open(state, options.pool)
        identity = authority.own_identity(state, "head", "head", time.time())
        pin = codes.pin_of(tls.library().PEM_cert_to_DER_cert(identity.certificate))
        enrolment = Enrolment(store, table, authority, pin, options.pool)
    listen = join_address(options.listen_host, options.listen_port) if options.listen_host else ""
    head = Head(
        options.pool, store, standing=True, enrolment=enrolment, table=table, listen=listen,
        rule=options.rule, files=state / "submitted" if enrolment is not None else None,
    )  # fmt: skip
    head.plan_tasks(state / "rounds.jsonl" if options.rule == DEFAULT else None)
    return head, identity


async def serve(options: Options) -> None:
    # Each TLS connection keeps a buffer of this size, by default of 256 KiB.
    sslproto.SSLProtocol.max_size = limits.READ_BYTES
    head, identity = make_head(options)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(paths.socket_name(paths.local_pool_id(options.pool), "head"))
    local.listen(256)
    listeners = [Listener(local, head.serve_local)]
    if identity is not None:
        listener = _listen("--listen", options.listen_host, options.listen_port)
        context = tls.server_context(identity, strangers=True)
        listeners.append(Listener(listener, head.serve_network, context))
    metrics_listener = None
    if options.metrics_port:
        metrics_listener = _listen("--metrics", options.metrics_host, options.metrics_port)
    head.store.write_audit(time.time(), "head", "start", f"pid {os.getpid()}")
    _log.info("the head of pool %s is ready; it listens at %s", head.pool, head.listen or "no port")
    process.report_ready()
    # Not earlier: a coroutine that an error keeps from running warns that nobody awaited it.
    work = [head.watch(), head.people.watch()]
    if metrics_listener is not None:
        work.append(metrics.serve(head, metrics_listener, identity))
    await asyncio.gather(*work)  # none of them ends
    del listeners


def main() -> None:
    """`python -m shoal.pool.local.head_process OPTIONS_JSON`: ends with `shoal up`, which starts it."""
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.set_up("head")
    options = msgspec.json.decode(sys.argv[1], type=Options)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each connection
    try:
        asyncio.run(serve(options))
    except (ShoalError, OSError) as error:
        process.report_failure(process.start_problem(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
