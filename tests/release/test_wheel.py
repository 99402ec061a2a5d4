"""The release as its users get it: `make test-wheel` builds it and runs these.

The wheel was built from the source archive, in an environment of its own. They install torch and Shoal
from the package index into a new environment, so they need the network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = os.environ.get("SHOAL_RELEASE", "")
MANYLINUX_MAX = (2, 36)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not RELEASE, reason="run: make test-wheel"),
]


def wheel() -> Path:
    (found,) = (ROOT / RELEASE).glob("*.whl")
    return found


def in_the_wheel() -> dict[str, bytes]:
    with zipfile.ZipFile(wheel()) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_the_source_archive() -> dict[str, bytes]:
    """Return its files, named from its one folder."""
    (found,) = (ROOT / RELEASE).glob("*.tar.gz")
    with tarfile.open(found) as archive:
        files = {member.name.partition("/")[2]: member for member in archive if member.isfile()}
        return {name: archive.extractfile(files[name]).read() for name in files}  # type: ignore[union-attr]


def core() -> bytes:
    (found,) = (
        data for name, data in in_the_wheel().items() if re.search(r"/_core\..*\.so$", name)
    )
    return found


def run(*command: str | Path, **environment: str) -> str:
    """Run without a compiler: only the environment's own programs are found."""
    kept = {
        k: v for k, v in os.environ.items() if k.startswith(("PIP_", "HTTP", "http", "SSL", "HOME"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        env={**kept, **environment}, cwd="/", capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that has the wheel and what pip brings for it."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    installed = home / "bin" / "python"
    run(installed, "-m", "pip", "install", "--quiet", "torch==2.13.0", PATH=str(home / "bin"))
    run(installed, "-m", "pip", "install", "--quiet", wheel(), PATH=str(home / "bin"))
    return installed


def test_its_tag_is_one_that_many_systems_accept() -> None:
    tags = re.findall(r"manylinux_(\d+)_(\d+)_x86_64", wheel().name)
    assert tags, wheel().name
    assert min((int(major), int(minor)) for major, minor in tags) <= MANYLINUX_MAX


def test_it_holds_the_core_and_none_of_torchs_libraries() -> None:
    libraries = [n for n in zipfile.ZipFile(wheel()).namelist() if ".so" in n or ".libs/" in n]
    assert any(Path(name).name.startswith("_core.") for name in libraries)
    assert {Path(name).parent.name for name in libraries} == {"shoal"}


def test_the_core_looks_for_torch_beside_itself() -> None:
    """And not where the building machine had it."""
    assert set(re.findall(rb"[^\0]*/torch/lib(?=[:\0])", core())) == {b"$ORIGIN/../torch/lib"}


@pytest.mark.parametrize("files", [in_the_wheel, in_the_source_archive])
def test_no_path_of_the_building_machine_is_inside(files: Callable[[], dict[str, bytes]]) -> None:
    own = re.escape(str(ROOT).encode()) + b"/|" + re.escape(sys.prefix.encode()) + b"/"
    found = re.compile(own + rb"|/site-packages/torch/|/build-env-|/build-via-sdist-")
    assert not [name for name, data in files().items() if found.search(data)]


def test_error_texts_still_name_source_files() -> None:
    assert b"csrc/worker/execute/" in core()


@pytest.mark.parametrize(
    ("files", "static"),
    [(in_the_wheel, "shoal/web/static"), (in_the_source_archive, "src/shoal/web/static")],
)
def test_the_dashboard_is_inside_with_its_licences(
    files: Callable[[], dict[str, bytes]], static: str
) -> None:
    found = files()
    for name in ("index.html", "app.js", "app.css"):
        assert found[f"{static}/{name}"] == (ROOT / "src/shoal/web/static" / name).read_bytes()
    licences = found[f"{static}/licences.txt"].decode()
    used = json.loads((ROOT / "web" / "package.json").read_text())["dependencies"]
    del used["esbuild"]  # it bundles, and is not in the bundle
    bundled = [name for name in used if re.search(rf"^{name} [\d.]+ \(", licences, re.MULTILINE)]
    assert bundled == list(used)
    assert licences.count("Permission is hereby granted") >= len(used)


def test_its_licence_is_inside() -> None:
    (licence,) = (n for n in in_the_wheel() if n.endswith(".dist-info/licenses/LICENSE"))
    assert in_the_wheel()[licence] == (ROOT / "LICENSE").read_bytes()


def test_the_first_program_runs(python: Path, tmp_path: Path) -> None:
    path = str(python.parent)
    out = run(python, ROOT / "examples" / "first_program.py", PATH=path, HOME=str(tmp_path))
    assert "on shoal:0" in out


def test_its_command_runs(python: Path, tmp_path: Path) -> None:
    out = run(python.parent / "shoal", "doctor", PATH=str(python.parent), HOME=str(tmp_path))
    assert "BAD" not in out


def test_another_torch_is_refused_by_pip(python: Path) -> None:
    required = run(
        python, "-c", "from importlib.metadata import requires; print(requires('shoal'))",
        PATH=str(python.parent),
    )  # fmt: skip
    assert "torch==2.13.0" in required


def test_another_torch_is_refused_with_the_line_to_type(python: Path) -> None:
    """Where somebody replaced torch afterwards: the wheel's own check, with its compiled version."""
    said = run(
        python, "-c", "import shoal.device as d\ntry: d.check_torch('2.12.1+cpu')\n"
        "except ImportError as error: print(error)", PATH=str(python.parent),
    )  # fmt: skip
    assert said.strip().endswith("Type: pip install torch==2.13.0")


def test_the_source_archive_has_all_that_a_build_needs() -> None:
    inside = set(in_the_source_archive())
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} <= inside
    sources = {
        str(path.relative_to(ROOT))
        for place in ("csrc", "src")
        for path in (ROOT / place).rglob("*")
        if path.suffix in (".cpp", ".h", ".py", ".pyi")
    }
    assert sources <= inside
