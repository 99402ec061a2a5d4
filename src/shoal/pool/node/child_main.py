"""What a child of the fork server does: it reads its order from the line, and becomes that."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import assert_never

from shoal.errors import describe
from shoal.pool.base import limits
from shoal.pool.node import hardware, orders, reader_process, worker_main
from shoal.pool.wire import frames


def run(line: socket.socket) -> None:
    """Obey the order. Only a probe returns."""
    order, fds = frames.receive(line, orders.ORDER, limits.ORDER_FDS_MAX)
    match order:
        case orders.ServeSession():
            worker_main.serve(order, fds, line)
        case orders.ServeReader():
            reader_process.serve(order, fds, line)
        case orders.ProbeDevice(device):
            _probe(device, line)
        case _:
            assert_never(order)


def _probe(device: str, line: socket.socket) -> None:
    answer: orders.FromChild
    try:
        answer = hardware.probe(device)
    except Exception as error:  # whatever a driver raises
        answer = orders.Failed(describe(error)[:2000])
    with suppress(OSError):
        frames.send(line, answer)
