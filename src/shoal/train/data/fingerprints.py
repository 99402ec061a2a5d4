"""Fingerprints show whether a path means the same files on two machines, without sending them.

A fingerprint covers names, sizes, the beginning of files and blocks from all over them. Files that were
written differently differ in those. It does not protect against deliberate deception.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.pool.wire.data_messages import Fingerprint
from shoal.train.group.errors import DataError

HEAD_BYTES = 2**16
BLOCK_BYTES = 2**12
BLOCKS = 16  # of a file, besides its head; the last one ends with it
FILES_READ = 32  # of those behind one path; the others count with name and size


def fingerprint(base: Path, files: Sequence[Path]) -> Fingerprint:
    """Compute the fingerprint of files, with their names relative to `base`."""
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
    return Fingerprint(len(files), total, digest.digest())


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, spread evenly."""
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


def difference(here: Fingerprint, there: Fingerprint) -> str | None:
    """Describe how two fingerprints differ; None if they do not."""
    if here.files != there.files:
        return f"{here.files} files here, {there.files} there"
    if here.total_bytes != there.total_bytes:
        return f"{here.total_bytes} bytes here, {there.total_bytes} there"
    return "the same size, but different bytes" if here.digest != there.digest else None
