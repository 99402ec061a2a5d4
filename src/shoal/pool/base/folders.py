"""The folders that a node serves to the sessions on its devices: what a reader may open, and no more.

Paths come from clients. Each is resolved, symbolic links and all, before anything is opened, and must
lie below a folder that the node's owner named.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from shoal.errors import PoolError, ShoalError
from shoal.pool.base.limits import DATA_FOLDERS_MAX, DATA_PATH_CHARS_MAX

MAGIC = "*?["  # makes a path a pattern


class FolderError(ShoalError):
    """A path is not served; the text says why and what to type."""


def named(folders: Iterable[str]) -> list[str]:
    """Return the folders that an owner named, as resolved paths. Raise PoolError for others."""
    found = []
    for folder in folders:
        resolved = os.path.realpath(folder)
        if not os.path.isdir(resolved):
            raise PoolError(f"--data {folder} is not a folder")
        if len(resolved) > DATA_PATH_CHARS_MAX:
            raise PoolError(f"--data {folder} is a path of more than {DATA_PATH_CHARS_MAX} letters")
        if resolved not in found:
            found.append(resolved)
    if len(found) > DATA_FOLDERS_MAX:
        raise PoolError(
            f"--data can be given {DATA_FOLDERS_MAX} times at most. Name a folder above them"
        )
    return found


def split_pattern(text: str) -> tuple[str, str]:
    """Split a path before its first component with a wildcard.

    >>> split_pattern("/data/shards/*.tar")
    ('/data/shards', '*.tar')
    """
    parts = Path(text).parts
    fixed = next((i for i, p in enumerate(parts) if any(c in p for c in MAGIC)), len(parts))
    return str(Path(*parts[:fixed])), str(Path(*parts[fixed:])) if fixed < len(parts) else ""


class Folders:
    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = [Path(folder) for folder in folders]

    def __bool__(self) -> bool:
        return bool(self._folders)

    def resolve(self, text: str) -> list[Path]:
        """The file or folder that a path means here, or the files that a pattern does. They keep the
        names by which they were asked for: those say what kind they are."""
        if "\0" in text or not os.path.isabs(text):
            raise FolderError(f"{text!r} is not an absolute path")
        fixed, pattern = split_pattern(text)
        if ".." in Path(pattern).parts:
            raise FolderError(f"{text!r}: a pattern must not contain '..'")
        base = Path(os.path.normpath(fixed))
        self.check(base)
        if not pattern:
            return [base]
        # A file outside, behind a link, is as one that does not exist: the answer tells nothing of it.
        found = [path for path in sorted(glob.glob(str(base / pattern))) if self._serves(path)]
        if not found:
            raise FolderError(f"no file matches {text} at the node")
        for path in found:
            self.check(Path(path))
        return [Path(path) for path in found]

    def _serves(self, path: str | Path) -> bool:
        resolved = Path(os.path.realpath(path))
        return any(resolved.is_relative_to(folder) for folder in self._folders)

    def check(self, path: Path) -> None:
        """Raise unless the path leads to a file or folder below a folder that is served.

        What is outside gets one answer, whether it exists or not.
        """
        if not self._serves(path):
            raise FolderError(
                f"{path} is not below a folder that this node serves. Its owner can serve it: add "
                f"--data {path if path.suffix == '' else path.parent} to `shoal node` or `shoal up`"
            )
        try:
            mode = os.stat(os.path.realpath(path)).st_mode
        except OSError as error:
            raise FolderError(f"{path} cannot be read at the node: {error.strerror}") from None
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise FolderError(f"{path} is neither a file nor a folder at the node")
