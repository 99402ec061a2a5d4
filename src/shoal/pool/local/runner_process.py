"""The runner as a process of its own: `shoal up`, `node` or `runner` keeps it running."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from shoal.errors import ShoalError
from shoal.pool.base import log, paths, process
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.runner import process_tree
from shoal.pool.runner.runner import Runner
from shoal.pool.runner.sandbox import bubblewrap
from shoal.pool.wire import tls
from shoal.pool.wire.channel import Channel, connect_to_head


class Options(msgspec.Struct):
    name: str
    url: str  # of the pool
    state: str  # directory
    identity: str = ""  # file; "": the head is on this machine
    sandbox: bool = False  # for other people's programs
    network_url: str = ""  # of the pool, for programs in a sandbox; "": url


def sandbox_problem() -> str | None:
    """Return why this machine cannot run other people's programs, or None if it can."""
    return bubblewrap.problem()


def main() -> None:
    """`python -m shoal.pool.local.runner_process OPTIONS_JSON`: ends with its parent."""
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, lambda *_: None)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    log.set_up(f"runner[{options.name}]")
    try:
        process_tree.become_subreaper()
        state = Path(options.state)
        paths.make_directory(state)
        identity = tls.Identity.load(Path(options.identity)) if options.identity else None
        runner = Runner(
            options.name, state, options.network_url or options.url, os.getpid(),
            is_local=options.url.startswith(LOCAL_PREFIX), sandbox=options.sandbox,
            on_ready=process.report_ready,
        )  # fmt: skip

        def connector() -> asyncio.Future[Channel]:
            context = tls.client_context(identity) if identity is not None else None
            return asyncio.ensure_future(connect_to_head(options.url, context))

        asyncio.run(runner.run(connector))
    except (ShoalError, OSError) as error:
        process.report_failure(process.start_problem(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
