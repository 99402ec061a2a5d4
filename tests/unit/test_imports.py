"""What must stay small imports neither torch nor numpy: the command line, the head and the agent."""

from __future__ import annotations

import pytest

from tests.support import programs

HEAVY = "{'torch', 'numpy', 'highspy', 'rich'}"


@pytest.mark.parametrize(
    "load",
    [
        "from shoal.cli.main import main; main(['--help'], standalone_mode=False)",
        "from shoal.cli.main import main; main(['devices', '--help'], standalone_mode=False)",
        "from shoal.pool.local import agent_process, embedded, head_process",
    ],
)
def test_heavy_modules_are_not_imported(load: str) -> None:
    found = programs.succeed(
        f"import sys\n{load}\nprint('heavy', sorted({HEAVY} & set(sys.modules)))"
    )
    assert found.splitlines()[-1] == "heavy []"
