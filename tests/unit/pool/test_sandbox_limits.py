"""What a sandbox is made of, and what ends a program in it, without starting one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.pool.base import limits
from shoal.pool.runner.sandbox import bubblewrap, seccomp, watch
from shoal.pool.runner.sandbox.bubblewrap import Places


def test_files_are_counted_once_and_without_what_links_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SANDBOX_FOLDER_BYTES", 300_000)
    (tmp_path / "a").write_bytes(b"x" * 200_000)
    (tmp_path / "same").hardlink_to(tmp_path / "a")
    (tmp_path / "outside").symlink_to("/usr")
    assert watch.too_large([tmp_path]) is None
    (tmp_path / "b").write_bytes(b"x" * 200_000)
    assert "over" in (watch.too_large([tmp_path]) or "")


def test_many_files_and_deep_folders_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    at = os.open(deep, os.O_RDONLY)
    for _ in range(1200):  # longer than a path may be
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    assert "nested" in (watch.too_large([deep]) or "")
    subprocess.run(["rm", "-rf", str(deep)], check=True)
    monkeypatch.setattr(limits, "SANDBOX_FILES_MAX", 5)
    for number in range(6):
        (tmp_path / str(number)).touch()
    assert "files" in (watch.too_large([tmp_path]) or "")


def test_processes_and_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys, time; held = bytearray(64 * 2**20); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        monkeypatch.setattr(watch, "memory_bytes", lambda: 2**40)
        assert watch.too_many(os.getpid()) is None
        monkeypatch.setattr(watch, "memory_bytes", lambda: 32 * 2**20)
        assert "memory" in (watch.too_many(os.getpid()) or "")
        monkeypatch.setattr(limits, "SANDBOX_PROCESSES_MAX", 0)
        assert "processes" in (watch.too_many(os.getpid()) or "")
    finally:
        child.kill()
        child.wait()


def test_it_says_once_what_was_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SANDBOX_FILES_MAX", 0)
    (tmp_path / "a").touch()
    said: list[str] = []
    ended = threading.Event()
    watch.Watch(os.getpid(), [tmp_path], lambda what: (said.append(what), ended.set())[1]).start()  # type: ignore[func-returns-value]
    assert ended.wait(30)
    assert len(said) == 1


def test_secrets_are_in_no_command_line(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path, tmp_path / "door")
    words, fds = bubblewrap.command(places, "the key", {"TOKEN": "hidden"}, ["train", "--lr", "1"])
    try:
        assert words[-3:] == ["train", "--lr", "1"]
        assert "the key" not in " ".join(words)
        assert "hidden" not in " ".join(words)
        data = b"".join(os.pread(fd, 2**20, 0) for fd in fds)
        assert b"the key" in data
        assert b"TOKEN\0hidden" in data
        for one in ("--unshare-net", "--unshare-pid", "--unshare-user", "--disable-userns"):
            assert one.encode() in data
    finally:
        for fd in fds:
            os.close(fd)


def test_without_bubblewrap_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt install bubblewrap" in (bubblewrap.problem() or "")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions(machine: str) -> None:
    code = seccomp.program(machine)
    assert len(code) % 8 == 0
    assert len(code) // 8 < 256  # jumps have eight bits


def test_nothing_of_the_home_is_shown_but_python_and_shoal() -> None:
    home = str(Path.home())
    assert home not in bubblewrap.python_folders()
    assert all(p == sys.base_prefix or p == sys.prefix or "shoal" in p
               for p in bubblewrap.python_folders())  # fmt: skip
