"""Patterns of paths: what a snapshot leaves out, and which results are kept. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def matches(path: str, pattern: str) -> bool:
    """Return whether a path matches; `**` stands for any number of folders.

    >>> matches("runs/1/a.pt", "runs/**"), matches("runs/1/a.pt", "runs/*.pt"), matches("a", "a")
    (True, False, True)
    """
    return _match(path.split("/"), pattern.removeprefix("./").rstrip("/").split("/"))


def _match(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _match(path[1:], pattern[1:])


def may_hold(folder: str, pattern: str) -> bool:
    """Return whether a path below a folder may match.

    >>> may_hold("runs/1", "runs/**"), may_hold(".venv", "runs/**"), may_hold("runs", "*.pt")
    (True, False, False)
    """
    wanted = pattern.removeprefix("./").rstrip("/").split("/")
    for number, name in enumerate(folder.split("/")):
        if number < len(wanted) and wanted[number] == "**":
            return True
        if number >= len(wanted) or not fnmatch.fnmatchcase(name, wanted[number]):
            return False
    return len(wanted) > folder.count("/") + 1


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: str
    only_folders: bool
    keeps: bool  # "!pattern": takes back what an earlier rule left out


class Ignored:
    """What the lines of .gitignore or .shoalignore leave out. The last rule that matches decides.

    >>> ignored = Ignored(["*.pt", "/data/", "!keep.pt"])
    >>> ignored.leaves_out("runs/a.pt", False), ignored.leaves_out("keep.pt", False)
    (True, False)
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules: list[_Rule] = []
        for line in lines:
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            keeps = text.startswith("!")
            text = text.removeprefix("!")
            only_folders, text = text.endswith("/"), text.rstrip("/")
            anchored = "/" in text
            pattern = text.lstrip("/") if anchored else f"**/{text}"
            self._rules.append(_Rule(pattern, only_folders, keeps))

    def leaves_out(self, path: str, is_folder: bool) -> bool:
        found = False
        for rule in self._rules:
            if (is_folder or not rule.only_folders) and matches(path, rule.pattern):
                found = not rule.keeps
        return found
