"""Waits for a lease, and says what for: one line on a terminal, else one entry of the log."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time

from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import limits
from shoal.pool.client.head_connection import Connection, PoolUnreachable
from shoal.pool.wire import admission_messages, frames, messages

_log = logging.getLogger("shoal")


def parse_wait(wait: bool | float | None) -> bool | float:
    """Return how long to wait: False, True for as long as it takes, or seconds.

    >>> parse_wait(90)
    90.0
    """
    asked: object = wait
    if wait is None:
        text = os.environ.get("SHOAL_WAIT", "").strip()
        if text in ("", "0"):
            return False
        if text == "1":
            return True
        asked = text
    if isinstance(asked, bool):
        return asked
    try:
        seconds = float(str(asked))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= limits.WAIT_S_MAX:
        name = "SHOAL_WAIT" if wait is None else "wait"
        yes = "1" if wait is None else "True"
        raise ValueError(
            f"{name} is {yes}, or seconds above 0 and up to {limits.WAIT_S_MAX:.0f} (got {asked!r})"
        )
    return seconds


def ask_lease(url: str, request: messages.AskLease) -> tuple[Connection, messages.FromHead]:
    """Ask for a lease, and wait for it if the request says so. The connection stays open."""
    begin = time.monotonic()
    connection = Connection(url)
    try:
        # A head that hangs accepts connections, too. A lease may take long, a beat does not.
        left_s = limits.CONNECT_S - (time.monotonic() - begin)
        connection.ask(messages.Beat(), max(limits.FIRST_ANSWER_S_MIN, left_s))
        if not request.wait:
            return connection, connection.ask(request)
        return connection, _wait(connection, request)
    except BaseException:  # Ctrl-C, too: the head withdraws the request
        connection.close()
        raise


def _wait(connection: Connection, request: messages.AskLease) -> messages.FromHead:
    line = ProgressLine()
    try:
        connection.send(request)
        heard = time.monotonic()
        # An embedded pool's devices may be starting, and until then its head says nothing.
        patience_s = limits.ANSWER_S
        while True:
            try:
                message = connection.receive(limits.WAIT_BEAT_S)
            except frames.Silence:
                if time.monotonic() - heard > patience_s:
                    raise
                connection.send(messages.Beat())
                continue
            heard = time.monotonic()
            match message:
                case messages.Beat():
                    pass
                case admission_messages.Waiting():
                    line.show(message)
                case messages.Refusal(reason):
                    raise LeaseError(reason)
                case _:
                    return message
    except ProtocolError as error:
        raise PoolUnreachable(connection.url, error) from None
    finally:
        line.clear()


class ProgressLine:
    """What a program waits for: on a terminal a line that is rewritten, else an entry of the log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
        self._shown = False

    def show(self, waiting: admission_messages.Waiting) -> None:
        text = describe(waiting, time.time())
        if self._terminal is not None:
            width = max(20, shutil.get_terminal_size().columns - 1)
            self._terminal.write(f"\r\x1b[K{text[:width]}")
            self._terminal.flush()
        elif not self._shown:
            _log.warning("%s", text)
        self._shown = True

    def clear(self) -> None:
        if self._terminal is not None and self._shown:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()


def describe(waiting: admission_messages.Waiting, now: float) -> str:
    """Return one line: what is waited for, since when, and about how long."""
    why = waiting.why
    first = why.reasons[0].text if why.reasons else "its devices"
    more = (
        f" (+{len(why.reasons) - 1}: shoal why {waiting.request})" if len(why.reasons) > 1 else ""
    )
    text = f"shoal: {waiting.request} waits, place {waiting.place}: {first}{more}"
    if why.never:
        text += "; the pool as it is now can never grant it"
    elif why.estimate is not None:
        at = time.strftime("%H:%M", time.localtime(why.estimate.start))
        left_s = why.estimate.start - now
        text += f"; starts about {at}" if left_s >= 60 else "; starts within a minute"
    return text
