"""Broken files, as `shoal simulate` meets them: exit code 2 and an error with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shoal.cli.simulation.simulate import simulate

HEADER = "name,type,steps,arrival_s,devices,weight,deadline_s,kinds,owner\n"
GOOD = "ok,a,5,0,1,1,,,\n"
TABLE = "kind,type,devices,steps_per_s,memory\ngpu,a,1,10,4GiB\ngpu,b,2,5,20GiB\n"
GAVEL = "LM\tx\tx\t-n\t1\t100\t1\t1\t-1.0\t0\n"
GAVEL_TABLE = json.dumps(
    {"gpu": {"('LM', 1)": {"null": 4.0, "('A', 1)": [1.0, 2.0]}, "('A', 1)": {"null": 3.0}}},
    indent=1,
)


def _gavel(**changes: object) -> str:
    names = ("type", "c", "d", "n", "data", "steps", "gpus", "weight", "slo", "arrival")
    cells = dict(zip(names, GAVEL.strip().split("\t"), strict=True))
    return GAVEL + "\t".join(str(value) for value in (cells | changes).values()) + "\n"


def _simulate(
    folder: Path, trace: str | bytes, table: str | bytes, devices: str = "gpu:2:16GiB"
) -> Result:
    for name, text in (("trace", trace), ("table", table)):
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    arguments = [str(folder / "trace"), "--throughputs", str(folder / "table")]
    return CliRunner().invoke(simulate, [*arguments, "--devices", devices, "--json"])


def _refused(result: Result, told: str) -> None:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert told in result.output


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        ("", "trace:1: header: the file is empty"),
        (HEADER, "trace:1: name: the trace has no tasks"),
        (bytes(range(256)), "trace:2: text: is not UTF-8 text: byte 0x80"),
        (b"\0" * 64, "trace:1: text: has the control character"),
        ((HEADER + GOOD).encode("utf-16"), "trace:1: text: is not UTF-8 text: byte 0xff"),
        (HEADER + "t\x1b[31m,a,5,0,1,1,,,\n", "trace:2: text: has the control character"),
        (HEADER + GOOD + GOOD, "trace:3: name: 'ok' is the task of line 2 already"),
        (HEADER + "t,a,1e308,0,1,1,,,\n", "trace:2: steps: '1e308' must be"),
        (HEADER + "t,a,1e-300,0,1,1,,,\n", "trace:2: steps: '1e-300' must be"),
        (HEADER + "t,a,1_000,0,1,1,,,\n", "trace:2: steps: '1_000' is not a number"),
        (HEADER + "t,a,5,1e300,1,1,,,\n", "trace:2: arrival_s: '1e300' must be"),
        (HEADER + "t,a,5,0,1e9,1,,,\n", "trace:2: devices: '1e9' must be"),
        (HEADER + "t,a,5,0,1,1e300,,,\n", "trace:2: weight: '1e300' must be"),
        (HEADER + "t,a,5,0,1,1,1e300,,\n", "trace:2: deadline_s: '1e300' must be"),
        (HEADER + "t,a,1e14,0,1,1,,,\n", "trace:2: steps: the fastest kind needs 1e+13 s"),
        (HEADER + "t,a,5,0,1,1,,,,more\n", "trace:2: owner: 10 columns instead of 9"),
        (HEADER + '"t,a,5,0,1,1,,,\n', "trace:2: line: is not CSV"),
        (HEADER + "x" * 200_000 + ",a,5,0,1,1,,,\n", "trace:2: line: is not CSV"),
        ("name,type,steps,arrival_s,steps\nx,a,1,0,9\n", "trace:1: steps: this column is there twice"),
        ("name;type;steps;arrival_s\nx;a;1;0\n", "trace:1: name: column is missing"),
        (HEADER + "t,b,5,0,2,1,,,\n", "trace:2: memory: task 't' fits nowhere"),
    ],
)  # fmt: skip
def test_broken_traces(tmp_path: Path, trace: str | bytes, told: str) -> None:
    _refused(_simulate(tmp_path, trace, TABLE), told)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("kind,type,devices,steps_per_s\n", "table:1: kind: the table has no lines"),
        (bytes(range(256)), "table:2: text: is not UTF-8 text"),
        (TABLE + "gpu,a,1,10,4GiB\n", "table:4: type: line 2 has this type"),
        (TABLE + "gpu,c,1,1e308,\n", "table:4: steps_per_s: '1e308' must be"),
        (TABLE + "gpu,c,1,1e-320,\n", "table:4: steps_per_s: '1e-320' must be"),
        (TABLE + "gpu,c,1,1,9999999999TiB\n", "table:4: memory: '9999999999TiB' is more"),
        (TABLE + "gpu,c,0,1,\n", "table:4: devices: '0' must be"),
    ],
)
def test_broken_tables(tmp_path: Path, table: str | bytes, told: str) -> None:
    _refused(_simulate(tmp_path, HEADER + GOOD, table), told)


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (_gavel(arrival="nan"), "trace:2: arrival_s: 'nan' is not finite"),
        (_gavel(arrival="1e300"), "trace:2: arrival_s: '1e300' must be"),
        (_gavel(steps="1e308"), "trace:2: total_steps: '1e308' must be"),
        (_gavel(gpus="two"), "trace:2: scale_factor: 'two' is not a number"),
        (_gavel(slo="inf"), "trace:2: SLO: 'inf' is not finite"),
        (_gavel(type=" "), "trace:2: job_type: is empty"),
        (_gavel(type="unknown"), "trace:2: type: 'unknown' on 1 devices is not in"),
        (GAVEL + "LM\tx\tx\t-n\t1\t5\n", "trace:2: scale_factor: 6 columns instead of 10"),
        (GAVEL.encode() + b"\xff\n", "trace:2: text: is not UTF-8 text"),
        ("\t\t\t\t\t\t\n", "trace:1: job_type: the trace has no tasks"),
    ],
)
def test_broken_gavel_traces(tmp_path: Path, trace: str | bytes, told: str) -> None:
    _refused(_simulate(tmp_path, trace, GAVEL_TABLE, "gpu:2"), told)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("4.0", "NaN", "table:4: gpu.('LM', 1).null: 'nan' is no speed"),
        ("4.0", "-4.0", "table:4: gpu.('LM', 1).null: '-4.0' is no speed"),
        ("4.0", "1e999", "table:4: gpu.('LM', 1).null: 'inf' is no speed"),
        ("4.0", "true", "table:4: gpu.('LM', 1).null: 'True' is no speed"),
        ("1.0,", "1.0, 3.0,", "table:5: gpu.('LM', 1).('A', 1): '[1.0, 3.0, 2.0]' is no pair"),
        ("('A', 1)", "A", "table:10: gpu.A: is not ('type', devices)"),
        ("('A', 1)", "('LM', 1)", "this key is there twice"),
        ('"null": 3.0', "", "table:10: gpu.('A', 1).null: the speed alone is missing"),
        ("3.0", "[" * 100_000, "table:1: table: is not JSON that can be used"),
        ("\n}", "", "table:13: table: is not JSON"),
    ],
)
def test_broken_gavel_tables(tmp_path: Path, old: str, new: str, told: str) -> None:
    _refused(_simulate(tmp_path, GAVEL, GAVEL_TABLE.replace(old, new), "gpu:2"), told)


@pytest.mark.parametrize("devices", ["gpu:99999999999", "gpu:1000001", "gpu:٣", "gpu:1:9e9GiB", ""])
def test_pools_that_cannot_be(tmp_path: Path, devices: str) -> None:
    _refused(_simulate(tmp_path, HEADER + GOOD, TABLE, devices), "Error: ")


def test_line_ends_and_byte_order_marks_of_other_systems_are_read(tmp_path: Path) -> None:
    for trace, table, devices in (
        (HEADER + GOOD, TABLE, "gpu:2:16GiB"),
        (GAVEL, GAVEL_TABLE, "gpu:2"),
    ):
        marked = [b"\xef\xbb\xbf" + t.replace("\n", "\r\n").encode() for t in (trace, table)]
        result = _simulate(tmp_path, marked[0], marked[1], devices)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["tasks"] == 1
