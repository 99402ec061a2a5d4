"""Files of tasks that run on other machines: by hash, and every list of them is hostile."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import msgspec
import pytest

from shoal.errors import PoolError
from shoal.pool.base import limits, snapshots
from shoal.pool.base.snapshots import File
from shoal.pool.head.tasks.files import FilesRefused, SubmittedFiles
from shoal.pool.runner import environments
from shoal.pool.wire.task_messages import FileChunk


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def chunk(data: bytes, offset: int = 0, part: bytes | None = None) -> FileChunk:
    part = data[offset:] if part is None else part
    return FileChunk(digest(data), offset, part, offset + len(part) == len(data))


def stored(root: Path, data: bytes) -> str:
    path = snapshots.file_of(root, digest(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return digest(data)


def a_list(root: Path, *files: File) -> str:
    return stored(root, msgspec.json.encode(list(files)))


def test_a_file_comes_in_parts_and_is_read_in_parts(tmp_path: Path) -> None:
    files, data = SubmittedFiles(tmp_path), b"x" * (limits.FILE_CHUNK_BYTES + 5)
    assert files.missing("ana", [digest(data)]) == [digest(data)]
    files.put("ana", chunk(data, 0, data[:10]))
    assert files.missing("ana", [digest(data)]) == [digest(data)]  # not whole
    files.put("ana", chunk(data, 10))
    assert files.missing("ana", [digest(data)]) == []
    assert files.missing("ben", [digest(data)]) == [digest(data)]  # who has what is private
    first, last = files.read("ana", digest(data), 0)
    assert (len(first), last) == (limits.FILE_CHUNK_BYTES, False)
    assert files.read("ana", digest(data), len(first)) == (b"x" * 5, True)


def test_a_part_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    files, data = SubmittedFiles(tmp_path), b"abcdef"
    with pytest.raises(FilesRefused):
        files.put("ana", chunk(data, 3))
    files.put("ana", chunk(data, 0, b"abc"))
    with pytest.raises(FilesRefused):
        files.put("ana", chunk(data, 4))


def test_other_bytes_than_the_hash_says_are_refused(tmp_path: Path) -> None:
    files = SubmittedFiles(tmp_path)
    with pytest.raises(FilesRefused, match="other bytes"):
        files.put("ana", FileChunk(digest(b"good"), 0, b"evil", True))
    assert files.missing("ana", [digest(b"good")]) == [digest(b"good")]


def test_an_owner_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILES_OF_OWNER_BYTES", 10)
    files = SubmittedFiles(tmp_path)
    files.put("ana", chunk(b"12345678"))
    with pytest.raises(FilesRefused, match="at most"):
        files.put("ana", chunk(b"abcdefgh"))
    files.put("ana", chunk(b"ab"))
    files.put("ben", chunk(b"abcdefgh"))
    again = SubmittedFiles(tmp_path)  # a new head counts what is there
    with pytest.raises(FilesRefused):
        again.put("ana", chunk(b"z"))


def test_a_snapshot_is_whole_with_all_its_files(tmp_path: Path) -> None:
    files = SubmittedFiles(tmp_path)
    listed = msgspec.json.encode([File("a.txt", digest(b"a"), 1), File("l", "", 0, link="a.txt")])
    files.put("ana", chunk(listed))
    assert not files.has("ana", digest(listed))
    files.put("ana", chunk(b"a"))
    assert files.has("ana", digest(listed))
    assert not files.has("ben", digest(listed))


@pytest.mark.parametrize(
    "file",
    [
        File("../out.txt", digest(b"a"), 1),
        File("/out.txt", digest(b"a"), 1),
        File("a/../../out.txt", digest(b"a"), 1),
        File("", digest(b"a"), 1),
        File("a", "../../../etc/passwd", 1),
        File("a", digest(b"a")[:-1] + "/", 1),
        File("a", digest(b"a"), limits.SNAPSHOT_BYTES_MAX + 1),
        File("a", digest(b"a"), -1),
        File("a\0b", digest(b"a"), 1),
    ],
)
def test_a_list_that_points_elsewhere_is_refused(tmp_path: Path, file: File) -> None:
    root, target = tmp_path / "store", tmp_path / "target"
    target.mkdir()
    stored(root, b"a")
    with pytest.raises(PoolError):
        snapshots.restore(a_list(root, file), target, root)
    assert list(target.iterdir()) == []
    assert not (tmp_path / "out.txt").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    root, target, outside = tmp_path / "store", tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    name = stored(root, b"evil")
    for files in (
        [File("d", "", 0, link=str(outside)), File("d/mine.txt", name, 4)],
        [File("f", "", 0, link=str(outside / "mine.txt")), File("f", name, 4)],
    ):
        with contextlib.suppress(PoolError):
            snapshots.restore(a_list(root, *files), target, root)
        assert (outside / "mine.txt").read_text() == "mine"
        assert [p.name for p in outside.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "text",
    ["--index-url http://evil", "-e /home/ana", "a @ file:///etc/passwd", "./local", "../x",
     "https://evil/x.whl", "-r /etc/passwd", "a --config-settings=x=y", "a\\\n--pre"],
)  # fmt: skip
def test_lists_of_packages_have_packages_only(text: str) -> None:
    with pytest.raises(environments.NotPlain):
        environments.check_plain(f"numpy\n{text}\n")


def test_lists_of_packages_have_versions_and_markers() -> None:
    plain = 'numpy>=1.26,<3\ntorch == 2.13.0  # this one\nx[a,b]~=1.0; python_version < "3.12"\n\n'
    assert environments.check_plain(plain) == plain
