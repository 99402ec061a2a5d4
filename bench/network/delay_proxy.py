"""A long way on one machine: a proxy that passes bytes on after a time, however many there are.

`python -m bench.network.delay_proxy TARGET_PORT ROUND_TRIP_MS` prints its port. It delays and does
not limit.
"""

from __future__ import annotations

import ctypes
import queue
import socket
import subprocess
import sys
import threading
import time

_PR_SET_TIMERSLACK = 29


def _pass_on(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """One direction of one connection: a reader, and a writer that is `delay_s` behind it."""
    line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def write() -> None:
        while True:
            due, data = line.get()
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return

    threading.Thread(target=write, daemon=True).start()
    while True:
        try:
            data = source.recv(256 * 1024)
        except OSError:
            data = b""
        line.put((time.perf_counter() + delay_s, data))
        if not data:
            return


def serve(port: int, round_trip_ms: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=32)
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = (one, other, round_trip_ms / 2000)
            threading.Thread(target=_pass_on, args=arguments, daemon=True).start()


class DelayProxy:
    def __init__(self, port: int, round_trip_ms: float) -> None:
        words = [sys.executable, "-m", "bench.network.delay_proxy", str(port), str(round_trip_ms)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


if __name__ == "__main__":
    sys.setswitchinterval(0.0001)
    # A sleep then ends on time, in this thread and those that it starts: to wait awake would take a
    # core from those who are measured.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    serve(int(sys.argv[1]), float(sys.argv[2]))
