"""A room of csrc finds the headers of the rooms that it may use, and no others."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "build" / "Release" / "compile_commands.json"
HEADERS = sorted((ROOT / "csrc").rglob("*.h"))
LOW = ["base", "wire", "memory", "transport", "network/tls", "network"]

pytestmark = pytest.mark.skipif(not COMMANDS.exists(), reason="the core is not built here")


@cache
def flags() -> dict[str, list[str]]:
    """The compiler's command for each room that has sources, without its source and output."""
    found: dict[str, list[str]] = {}
    for entry in json.loads(COMMANDS.read_text()):
        source = Path(entry["file"])
        if not source.is_relative_to(ROOT / "csrc"):
            continue
        command = shlex.split(entry["command"])
        del command[command.index("-o") : command.index("-o") + 2]
        command = [word for word in command if word not in ("-c", entry["file"])]
        found.setdefault(str(source.parent.relative_to(ROOT / "csrc")), command)
    found.pop("tests", None)
    return found


def compile_in(room: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*flags()[room], *arguments, "-x", "c++", "-"]
    if "-include" in command:  # torch's headers, which take a second
        del command[command.index("-include") : command.index("-include") + 2]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@cache
def sees(room: str) -> frozenset[str]:
    """The rooms whose headers a file of this room finds."""
    names = [header.relative_to(ROOT / "csrc") for header in HEADERS]
    text = "\n".join(f'#if __has_include("{n}")\nFOUND {n.parent}\n#endif' for n in names)
    result = compile_in(room, text, "-E", "-P")
    assert result.returncode == 0, result.stderr
    return frozenset(re.findall(r"^FOUND (\S+)$", result.stdout.replace(" / ", "/"), re.M)) - {room}


def rooms() -> list[str]:
    return list(flags()) if COMMANDS.exists() else []


def test_every_folder_is_a_room() -> None:
    folders = {str(p.parent.relative_to(ROOT / "csrc")) for p in (ROOT / "csrc").rglob("*.cpp")}
    assert set(rooms()) == folders - {"tests"}


@pytest.mark.parametrize("room", rooms())
def test_direction(room: str) -> None:
    """The client and the worker never see each other, and nothing sees what stands above it."""
    seen = sees(room)
    assert "python" not in seen
    if room in LOW:
        assert seen <= set(LOW[: LOW.index(room)])
    elif room.startswith("client/"):
        assert not [name for name in seen if name.startswith("worker/")]
    elif room.startswith("worker/"):
        assert not [name for name in seen if name.startswith("client/")]
        assert not [name for name in seen if name in rooms() and room in sees(name)]  # no circles


def test_rooms_without_torch() -> None:
    """What needs no torch cannot include it."""
    text = "#if __has_include(<c10/core/Storage.h>)\n#error torch\n#endif"
    with_torch = {room for room in rooms() if compile_in(room, text, "-E").returncode != 0}
    assert not with_torch & {*LOW, "worker/shared", "worker/peers"}
    assert "worker/paging" in with_torch  # else the look above would find nothing anywhere


def test_a_forbidden_include_does_not_compile() -> None:
    assert compile_in("transport", '#include "wire/limits.h"\n', "-fsyntax-only").returncode == 0
    result = compile_in("transport", '#include "network/lane.h"\n', "-fsyntax-only")
    assert result.returncode != 0
    assert "network/lane.h: No such file" in result.stderr
