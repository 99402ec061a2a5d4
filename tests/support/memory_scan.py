"""Looks for secrets in the memory of another process. Needs root, or a process of the same user that
has not hidden its memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r(.)\S+ \S+ \S+ \S+\s*(.*)")
_CHUNK_BYTES = 16 * 2**20


def found_in(pid: int, secrets: Mapping[str, bytes]) -> set[str]:
    """Return the names of the secrets whose bytes are in the process's memory."""
    longest = max(map(len, secrets.values()))
    found: set[str] = set()
    for data in _readable(pid, longest):
        found |= {name for name, secret in secrets.items() if secret in data}
    return found


def _readable(pid: int, overlap: int) -> Iterator[bytes]:
    """Yield all readable memory but libraries' code; pieces of one range overlap."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            match = _RANGE.match(line)
            if match is None:
                continue
            begin, end, writable, path = match.groups()
            if path.startswith("[v") or (writable == "-" and path.startswith("/")):
                continue
            at, last = int(begin, 16), int(end, 16)
            while at < last:
                try:
                    memory.seek(at)
                    data = memory.read(min(_CHUNK_BYTES, last - at))
                except OSError:  # a page behind the end of a file
                    break
                if not data:
                    break
                yield data
                at += len(data) if at + len(data) >= last else max(1, len(data) - overlap)
