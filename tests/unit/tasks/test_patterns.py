"""Which paths a pattern means, and what .gitignore leaves out: compared with git itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.client import snapshot
from shoal.tasks.patterns import matches, may_hold

PATHS = st.lists(st.text("ab-", min_size=1, max_size=3), min_size=1, max_size=4).map("/".join)


@given(PATHS)
def test_a_path_matches_itself_and_all(path: str) -> None:
    assert matches(path, path)
    assert matches(path, "**")
    assert matches(path, "/".join("*" for _ in path.split("/")))


@given(PATHS, st.lists(st.sampled_from(["a", "b*", "?", "*", "**"]), min_size=1).map("/".join))
def test_a_folder_of_what_matches_is_looked_into(path: str, pattern: str) -> None:
    folders = [path[:end] for end in range(len(path)) if path[end] == "/"]
    if matches(path, pattern):
        assert all(may_hold(folder, pattern) for folder in folders)


@pytest.mark.parametrize(
    ("path", "pattern", "found"),
    [
        ("a/b/c", "a/**/c", True), ("a/c", "a/**/c", True), ("a/b", "a", False), ("ab", "a?", True),
        ("a/b", "*", False), ("runs/1.txt", "./runs/*.txt", True),
    ],
)  # fmt: skip
def test_patterns(path: str, pattern: str, found: bool) -> None:
    assert matches(path, pattern) == found


TREE = ["a.py", "b.pt", "keep.pt", "data/x", "data/deep/y", "src/data/z", "src/b.pt", "logs/l.log"]
IGNORE = "# comment\n*.pt\n!keep.pt\n/data/\n*.log\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")
def test_a_snapshot_has_what_git_would_add(tmp_path: Path) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text(IGNORE)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert sorted(snapshot.names(tmp_path)) == sorted(listed)
    assert "src/data/z" in listed
