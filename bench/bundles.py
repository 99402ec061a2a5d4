"""Sizes of dashboards: what a browser loads for the first page, and all of it.

    python -m bench.bundles              # downloads the wheels of Ray and SkyPilot
    python -m bench.bundles WHEEL...

The first page is its HTML and the scripts and style sheets that the HTML names. Most load more of
them later. Every file is compressed with gzip -9, as a server would send it.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

STATIC = Path(__file__).parents[1] / "src" / "shoal" / "web" / "static"
#: Where a wheel has its dashboard, and the page that somebody sees first.
PEERS = {
    "ray": ("ray/dashboard/client/build/", "index.html"),
    "skypilot": ("sky/dashboard/out/", "clusters.html"),
}
KINDS = (".js", ".css", ".html")
#: A script or style sheet that HTML names; scripts for browsers without modules are not loaded.
NAMED = re.compile(
    r"""<(?:script(?![^>]*nomodule)[^>]*\ssrc|link[^>]*\shref)="?([^"\s>]+\.(?:js|css))""", re.I
)


def packed(data: bytes) -> int:
    return len(gzip.compress(data, 9, mtime=0))


def measure(files: dict[str, bytes], page: str) -> tuple[int, int]:
    """Return the bytes of the first page and of everything."""
    named = {PurePosixPath(name).name for name in NAMED.findall(files[page].decode())}
    first = [f for f in files if f == page or PurePosixPath(f).name in named]
    assert len(first) > 1, f"{page} names no script"
    return sum(packed(files[f]) for f in first), sum(packed(d) for d in files.values())


def ours() -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in STATIC.iterdir() if p.suffix in KINDS}


def of_wheel(wheel: Path, folder: str) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith(folder) and n.endswith(KINDS)]
        return {name.removeprefix(folder): archive.read(name) for name in names}


def report(wheels: list[Path]) -> None:
    rows = [("shoal", *measure(ours(), "index.html"))]
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        folder, page = PEERS[name]
        rows.append((f"{name} {version}", *measure(of_wheel(wheel, folder), page)))
    print(f"{'gzip, kB':<20}{'first page':>12}{'all':>8}")
    for name, first, whole in rows:
        print(f"{name:<20}{first / 1000:>12.1f}{whole / 1000:>8.1f}")


def main() -> None:
    if len(sys.argv) > 1:
        report([Path(word) for word in sys.argv[1:]])
        return
    with tempfile.TemporaryDirectory(prefix="shoal-bundles-") as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*download, *PEERS], check=True)
        report(sorted(Path(folder).glob("*.whl")))


if __name__ == "__main__":
    main()
