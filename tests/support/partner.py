"""A second program that does what a test tells it, line by line."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any

from tests.support import programs

PROGRAM = """
    import json, os, sys
    import torch, shoal
    from shoal.device import leases
    known = {"torch": torch, "shoal": shoal, "leases": leases, "os": os}
    for line in sys.stdin:
        source = json.loads(line)
        try:
            try:
                code = compile(source, "<partner>", "eval")
            except SyntaxError:
                code = compile(source, "<partner>", "exec")
            answer = ["", eval(code, known)]
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        print(json.dumps(answer, default=str), flush=True)
"""
ANSWER_S = 60.0


class PartnerError(Exception):
    """What the partner's statement raised."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Partner:
    """`partner("1 + 1")` evaluates, or executes, in the other program and returns the value."""

    def __init__(self, **environment: str) -> None:
        self.process = programs.start(PROGRAM, **environment)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def __call__(self, source: str) -> Any:
        self.send(source)
        return self.receive()

    def send(self, source: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"the partner did not answer in {ANSWER_S} s")
            data = os.read(fd, 65536)
            if not data:
                assert self.process.stderr is not None
                raise AssertionError(f"the partner ended: {self.process.stderr.read()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        kind, value = json.loads(line)
        if kind:
            raise PartnerError(kind, value)
        return value

    def busy(self) -> bool:
        """Whether it has not answered yet."""
        assert self.process.stdout is not None
        return not self._rest and not select.select([self.process.stdout], [], [], 0)[0]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
