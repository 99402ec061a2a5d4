"""The head of a standing pool, as a process of its own; `shoal up` starts it, and again if it ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

import msgspec

from shoal.errors import ShoalError
from shoal.pool import codes, home, metrics, process, tls
from shoal.pool.channel import Listener
from shoal.pool.client import join_address
from shoal.pool.head import Head
from shoal.pool.leases import LeaseTable
from shoal.pool.store import Store


class Options(msgspec.Struct):
    pool: str
    state: str  # directory
    listen_host: str = ""  # "": this machine only
    listen_port: int = 0
    metrics_host: str = ""
    metrics_port: int = 0  # 0: none


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def make_head(options: Options) -> tuple[Head, tls.Identity | None]:
    """The head with its state and, if it is to listen, its authority."""
    state = Path(options.state)
    store = Store(state / "pool.db")
    table = LeaseTable()
    identity = enrolment = None
    if options.listen_host:
        from shoal.pool.enrolment import Enrolment
        from shoal.pool.identity import Authority

        authority = Authority.open(state, options.pool)
        identity = authority.own_identity(state, "head", "head", time.time())
        pin = codes.pin_of(ssl.PEM_cert_to_DER_cert(identity.certificate))
        enrolment = Enrolment(store, table, authority, pin, options.pool)
    listen = join_address(options.listen_host, options.listen_port) if options.listen_host else ""
    head = Head(options.pool, store, standing=True, enrolment=enrolment, table=table, listen=listen)
    return head, identity


async def serve(options: Options) -> None:
    head, identity = make_head(options)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(home.socket_name(home.local_pool_id(options.pool), "head"))
    local.listen(256)
    work = [head.watch(), Listener(local, head.serve_local).run()]
    if identity is not None:
        listener = _listen(options.listen_host, options.listen_port)
        context = tls.server_context(identity, strangers=True)
        work.append(Listener(listener, head.serve_network, context).run())
    if options.metrics_port:
        work.append(
            metrics.serve(head, _listen(options.metrics_host, options.metrics_port), identity)
        )
    head.store.write_audit(time.time(), "head", "start", f"pid {os.getpid()}")
    os.write(1, b"ready\n")
    await asyncio.gather(*work)  # none of them ends


def main() -> None:
    """`python -m shoal.pool.head_process OPTIONS_JSON`: started by `shoal up`, and ends with it."""
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each connection
    try:
        asyncio.run(serve(options))
    except (ShoalError, OSError) as error:
        sys.exit(f"shoal: the head cannot start: {error}")


if __name__ == "__main__":
    main()
