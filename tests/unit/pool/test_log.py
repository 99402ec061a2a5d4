"""Log lines: a time, a level and a component, as text or JSON."""

from __future__ import annotations

import json
import re

import pytest

from tests.support import programs

SPEAKS = """
import logging, warnings
from shoal.pool.base import log
log.set_up("agent[n1]")
logging.getLogger("shoal.pool.node.agent").info("not heard by default")
forged = "no\\n2026-01-01T00:00:00.000Z ERROR x: y"
logging.getLogger("shoal.pool.node.agent").warning("the head says: %s", forged)
logging.getLogger("asyncio").error("a task failed")
warnings.warn("old")
raise KeyError("x")
"""
LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) agent\[n1\]: (.*)")


def test_text_has_a_time_a_level_and_a_component() -> None:
    done = programs.run(SPEAKS)
    assert done.code == 1
    found = [m for line in done.err.splitlines() if (m := LINE.fullmatch(line))]
    assert [m[2] for m in found] == ["WARNING", "ERROR", "WARNING", "CRITICAL"]
    assert found[0][3] == "the head says: no\\n2026-01-01T00:00:00.000Z ERROR x: y"
    rest = [line for line in done.err.splitlines() if not LINE.fullmatch(line)]
    assert rest  # the traceback
    assert all(line.startswith("    ") for line in rest), rest


def test_json_is_one_object_for_each_record() -> None:
    done = programs.run(SPEAKS, SHOAL_LOG="json", SHOAL_LOG_LEVEL="info")
    found = [json.loads(line) for line in done.err.splitlines()]
    assert [f["level"] for f in found] == ["INFO", "WARNING", "ERROR", "WARNING", "CRITICAL"]
    assert {f["component"] for f in found} == {"agent[n1]"}
    assert all(f["time"].endswith("Z") and f["pid"] > 0 for f in found)
    assert "KeyError" in found[-1]["traceback"]


@pytest.mark.parametrize(
    ("variable", "said"), [("SHOAL_LOG", "text, json"), ("SHOAL_LOG_LEVEL", "debug, info")]
)
def test_a_setting_that_does_not_exist_is_refused(variable: str, said: str) -> None:
    done = programs.run("from shoal.pool.base import log; log.set_up('x')", **{variable: "loud"})
    assert f"{variable} is one of {said}" in done.err


def test_a_program_has_no_handler_of_ours() -> None:
    out = programs.succeed(
        """
        import logging, sys
        import shoal
        with shoal.up(["cpu,memory=16MiB,threads=1"]) as pool, shoal.connect(pool.url):
            print(logging.getLogger().handlers, logging.getLogger("shoal").handlers)
            print(sys.excepthook is sys.__excepthook__)
        """
    )
    assert out == "[] []\nTrue\n"
