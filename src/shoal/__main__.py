"""`python -m shoal`: the `shoal` command where the script is not on the PATH."""

from __future__ import annotations

from shoal.cli.main import main

if __name__ == "__main__":
    main(prog_name="shoal")
