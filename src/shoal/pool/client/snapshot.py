"""The files of `shoal submit --snapshot`: all below the folder but what is ignored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shoal.pool.base import snapshots
from shoal.tasks.patterns import Ignored


def take(folder: Path) -> str:
    """Store the files of a folder. Return the snapshot's name."""
    return snapshots.take(folder, names(folder))


def names(folder: Path) -> Iterator[str]:
    """Yield the paths below a folder, without .git and what .gitignore and .shoalignore name."""
    rules: dict[str, Ignored] = {}
    for directory, folders, files in os.walk(folder):
        below = os.path.relpath(directory, folder)
        lines = [
            line
            for name in snapshots.IGNORE_FILES
            if name in files
            for line in (Path(directory) / name).read_text(errors="replace").splitlines()
        ]
        if lines:
            rules[below] = Ignored(lines)
        kept = [
            f
            for f in sorted(folders)
            if not snapshots.skipped(f) and not _left_out(rules, below, f, True)
        ]
        links = [f for f in kept if (Path(directory) / f).is_symlink()]
        folders[:] = [f for f in kept if f not in links]
        for name in [*sorted(files), *links]:
            path = Path(directory) / name
            if not _left_out(rules, below, name, False) and (path.is_file() or path.is_symlink()):
                yield os.path.normpath(os.path.join(below, name))


def _left_out(rules: dict[str, Ignored], below: str, name: str, is_folder: bool) -> bool:
    """Return whether a file is left out by the rules of its folder, or of one above it."""
    path = os.path.normpath(os.path.join(below, name))
    for base, ignored in rules.items():
        if base == "." or path.startswith(base + "/"):
            relative = path if base == "." else path[len(base) + 1 :]
            if ignored.leaves_out(relative, is_folder):
                return True
    return False
