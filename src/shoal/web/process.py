"""The web process, which `shoal up` keeps running: `python -m shoal.web.process OPTIONS_JSON`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec
import uvicorn

from shoal.errors import ShoalError
from shoal.pool.base import log, paths, process
from shoal.web.app import Web, make_app
from shoal.web.head_connections import HeadConnections
from shoal.web.options import Options, address_of, names_of

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 2000


async def serve(options: Options) -> None:
    os.set_inheritable(options.socket, False)
    listener = socket.socket(fileno=options.socket)
    web = Web(options.pool, HeadConnections(paths.local_pool_id(options.pool)), address_of(options),
              options.join_host)  # fmt: skip
    config = uvicorn.Config(
        make_app(web, names_of(options)), http="httptools", ws="none", log_config=None,
        access_log=False, server_header=False, date_header=False, proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX, timeout_keep_alive=30, h11_max_incomplete_event_size=16384,
        ssl_certfile=options.certificate or None, ssl_keyfile=options.certificate or None,
    )  # fmt: skip
    server = uvicorn.Server(config)
    _log.info("the dashboard of pool %s is at %s", options.pool, web.address)
    process.report_ready()
    await server.serve(sockets=[listener])


def main() -> None:
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.set_up("web")
    options = msgspec.json.decode(sys.argv[1], type=Options)
    try:
        asyncio.run(serve(options))
    except (ShoalError, OSError) as error:
        process.report_failure(process.start_problem(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
