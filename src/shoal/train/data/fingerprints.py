"""Whether a path means the same files on two machines, without sending them.

A mark is of names, sizes, the beginning of files and blocks from all over them. Files that were written
differently differ in those; it is no proof against somebody who wants to deceive.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.pool.wire.data_messages import PathMark
from shoal.train.group.errors import DataError

HEAD_BYTES = 2**16
BLOCK_BYTES = 2**12
BLOCKS = 16  # of a file, beside its head; the last one ends with it
FILES_READ = 32  # of those behind one path; of the others name and size count


def mark(base: Path, files: Sequence[Path]) -> PathMark:
    """The mark of files; their names count from `base` on."""
    digest = hashlib.sha256()
    total = 0
    sizes = []
    for path in files:
        size = _size(path)
        sizes.append(size)
        total += size
        name = os.path.relpath(path, base).encode(errors="surrogateescape")
        digest.update(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little"))
    for number in spread(len(files), FILES_READ):
        _read(digest, files[number], sizes[number])
    return PathMark(len(files), total, digest.digest())


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, from the first to the last."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _read(digest: hashlib._Hash, path: Path, size: int) -> None:
    try:
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            blocks = max(0, size - HEAD_BYTES) // BLOCK_BYTES
            for block in spread(blocks, BLOCKS):
                file.seek(size - (blocks - block) * BLOCK_BYTES)
                digest.update(file.read(BLOCK_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def difference(here: PathMark, there: PathMark) -> str | None:
    """How they differ, in words; None if they do not."""
    if here.files != there.files:
        return f"{here.files} files here, {there.files} there"
    if here.total_bytes != there.total_bytes:
        return f"{here.total_bytes} bytes here, {there.total_bytes} there"
    return "as many bytes, but others" if here.digest != there.digest else None
