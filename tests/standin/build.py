"""Compiles the stand-in's libraries, once for each state of the sources, torch and compiler."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
         "-Wno-unused-parameter", "-Wno-missing-field-initializers"]  # fmt: skip
ROOMS = ("driver", "backend", "nvml")
#: What the fake NVML shares with the driver.
SHARED = ("config", "shared_state")


@dataclass(frozen=True)
class Libraries:
    """The compiled stand-in."""

    driver: Path  # instead of libcuda.so.1
    backend: Path  # torch's `cuda`
    nvml: Path  # instead of libnvidia-ml.so.1


def torch_folder() -> Path:
    """Return where torch lies, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("the stand-in needs torch. Type: pip install torch==2.13.0")
    return Path(found.origin).parent


def compiler() -> str:
    """Return the C++ compiler's command."""
    return os.environ.get("CXX", "g++")


def libraries() -> Libraries:
    """Return the libraries; compile them if this state of the sources has not been yet."""
    folder = ROOT / "build" / "standin" / _digest(*_sources())
    made = Libraries(
        folder / "libshoal_standin_driver.so",
        folder / "libshoal_standin.so",
        folder / "libnvidia-ml.so.1",
    )
    if (folder / "complete").exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            print("standin: compiling, which takes two minutes once", file=sys.stderr, flush=True)
            _compile(folder, made)
            (folder / "complete").touch()
    return made


def _sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (HERE / room).glob("*.*"))


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256(" ".join([version("torch"), compiler(), *FLAGS]).encode())
    digest.update(subprocess.run([compiler(), "--version"], capture_output=True).stdout)
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old(folder: Path, most: int) -> None:
    """Keep what was made last: a checkout that goes to and fro compiles each state once."""
    made = [path for path in folder.iterdir() if path.name != "lock"]
    for path in sorted(made, key=lambda path: path.stat().st_mtime)[:-most]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the stand-in does not compile:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def _compile(folder: Path, made: Libraries) -> None:
    torch = torch_folder()
    headers = [path for path in _sources() if path.suffix == ".h"]
    includes = ["-isystem", torch / "include", "-isystem",
                torch / "include/torch/csrc/api/include"]  # fmt: skip
    objects = folder.parent / "objects"
    objects.mkdir(exist_ok=True)
    # torch's headers take most of the time: they are parsed once for all files.
    pch = objects / _digest(HERE / "backend" / "pch.h") / "pch.h"
    if not Path(f"{pch}.gch").exists():
        pch.parent.mkdir(exist_ok=True)
        shutil.copy(HERE / "backend" / "pch.h", pch)
        _run(compiler(), *FLAGS, *includes, "-x", "c++-header", pch, "-o", f"{pch}.new")
        os.rename(f"{pch}.new", f"{pch}.gch")

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.parent.name}-{source.stem}-{_digest(source, *headers)}.o"
        if not target.exists():
            more = [*includes, "-include", pch] if source.parent.name == "backend" else []
            _run(compiler(), *FLAGS, *more, "-c", source, "-o", f"{target}.new")
            os.rename(f"{target}.new", target)
        return target

    sources = [path for path in _sources() if path.suffix == ".cpp"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        compiled = dict(zip(sources, pool.map(compile_one, sources), strict=True))
    room = {name: [made for source, made in compiled.items() if source.parent.name == name]
            for name in ROOMS}  # fmt: skip
    shared = [made for source, made in compiled.items() if source.stem in SHARED]
    link = [compiler(), "-shared", "-pthread", "-Wl,-z,defs"]
    _run(
        *link, *room["driver"], "-Wl,-soname,libshoal_standin_driver.so", "-ldl", "-o", made.driver
    )
    _run(*link, *room["nvml"], *shared, "-Wl,-soname,libnvidia-ml.so.1", "-o", made.nvml)
    _run(*link, *room["backend"], made.driver, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10",
         f"-Wl,-rpath,{torch / 'lib'}", "-Wl,-rpath,$ORIGIN", "-o", made.backend)  # fmt: skip
    _forget_old(objects, 100)
    _forget_old(folder.parent, 5)


if __name__ == "__main__":
    libraries()
