"""Formats: what is read, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.schedule.formats.tables import check_trace, read_table, read_trace, write_trace
from shoal.schedule.model.entities import InputError, Pool
from shoal.schedule.simulate.synthetic import generate
from shoal.units import parse_bytes

EXAMPLES = Path(__file__).parents[3] / "examples" / "schedule"
HEADER = "name,type,steps,arrival_s,devices,weight,deadline_s,kinds,owner\n"
TABLE = "kind,type,devices,steps_per_s,memory\ngpu,a,1,10,4GiB\ngpu,b,2,5,20GiB\n"


def _error(path: Path, text: str, read: object = read_trace) -> InputError:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read(path)  # type: ignore[operator]
    assert str(caught.value).startswith(f"{path}:")
    return caught.value


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("t,a,-5,0,1,1,,,", "steps"),
        ("t,a,nan,0,1,1,,,", "steps"),
        ("t,a,0,0,1,1,,,", "steps"),
        ("t,a,many,0,1,1,,,", "steps"),
        ("t,a,5,-1,1,1,,,", "arrival_s"),
        ("t,a,5,inf,1,1,,,", "arrival_s"),
        ("t,a,5,0,0,1,,,", "devices"),
        ("t,a,5,0,1.5,1,,,", "devices"),
        ("t,a,5,0,1,0,,,", "weight"),
        ("t,a,5,0,1,1,-3,,", "deadline_s"),
        ("t,,5,0,1,1,,,", "type"),
        ("t,a,5,0", "devices"),
    ],
)
def test_bad_values_name_file_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    error = _error(tmp_path / "bad.csv", f"# comment\n{HEADER}ok,a,5,0,1,1,,,\n{line}\n")
    assert (error.line, error.field) == (4, field)


def test_missing_and_unknown_columns(tmp_path: Path) -> None:
    assert _error(tmp_path / "t.csv", "name,type,steps\nx,a,1\n").field == "arrival_s"
    assert _error(tmp_path / "t.csv", "name,type,steps,arrival_s,size\n").field == "size"
    assert _error(tmp_path / "t.csv", "").field == "header"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("gpu,a,1,-1,1GiB", "steps_per_s"),
        ("gpu,a,1,NaN,1GiB", "steps_per_s"),
        ("gpu,a,1,1,big", "memory"),
    ],
)
def test_bad_table_lines(tmp_path: Path, line: str, field: str) -> None:
    header = TABLE.splitlines()[0]
    error = _error(tmp_path / "table.csv", f"{header}\n{line}\n", read_table)
    assert (error.line, error.field) == (2, field)


@pytest.mark.parametrize(
    ("line", "devices", "quotas", "field"),
    [
        ("t,a,5,0,1,1,,,", "tpu:1", {}, "kind"),
        ("t,c,5,0,1,1,,,", "gpu:4", {}, "type"),
        ("t,b,5,0,2,1,,,", "gpu:1", {}, "devices"),
        ("t,b,5,0,2,1,,,", "gpu:4:16GiB", {}, "memory"),
        ("t,a,5,0,1,1,,tpu,", "gpu:4", {}, "kinds"),
        ("t,b,5,0,2,1,,,ana", "gpu:4", {"ana": 1}, "devices"),
    ],
)
def test_tasks_that_can_never_run(
    tmp_path: Path, line: str, devices: str, quotas: dict[str, int], field: str
) -> None:
    (tmp_path / "trace.csv").write_text(f"{HEADER}{line}\n")
    (tmp_path / "table.csv").write_text(TABLE)
    trace, table = read_trace(tmp_path / "trace.csv"), read_table(tmp_path / "table.csv")
    with pytest.raises(InputError) as caught:
        check_trace(trace, table, Pool.parse(devices, quotas))
    assert caught.value.field == field
    assert caught.value.line == (1 if field == "kind" else 2)


def test_examples_are_read_and_a_trace_survives_writing(tmp_path: Path) -> None:
    trace = read_trace(EXAMPLES / "trace.csv")
    write_trace(tmp_path / "copy.csv", trace.tasks)
    assert read_trace(tmp_path / "copy.csv").tasks == trace.tasks
    table = read_table(EXAMPLES / "throughputs.csv")
    a100 = table.kinds.index("a100")
    pair = tuple(sorted([table.row_of["mlp", 1], table.row_of["resnet50", 1]]))
    assert table.rates(a100, pair) == (120.0, 18.0)


def test_beside_needs_both_sides(tmp_path: Path) -> None:
    text = "kind,type,devices,steps_per_s,beside\ng,a,1,2,\ng,b,1,2,\ng,a,1,1,b\n"
    assert _error(tmp_path / "t.csv", text, read_table).field == "beside"


def _gavel_line(**changes: object) -> str:
    cells = {"type": "LM", "c": "x", "d": "x", "n": "-n", "data": 1, "steps": 100, "gpus": 1,
             "weight": 1, "slo": "-1.0", "arrival": 0}  # fmt: skip
    return "\t".join(str(value) for value in (cells | changes).values())


def test_gavel_formats_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "t.trace").write_text(_gavel_line() + "\n" + _gavel_line(slo=60, gpus=2) + "\n")
    tasks = read_trace(tmp_path / "t.trace").tasks
    assert [task.devices for task in tasks] == [1, 2]
    assert [task.deadline_s for task in tasks] == [None, 60.0]
    beside = {"null": 4.0, "('A', 1)": [1.0, 2.0], "('LM', 1)": [0, 0]}
    raw = {"v100": {"('LM', 1)": beside, "('A', 1)": {"null": 3.0, "('LM', 1)": [2.0, 1.0]}}}
    raw["v100_unconsolidated"] = raw["v100"]
    (tmp_path / "table.json").write_text(json.dumps(raw))
    table = read_table(tmp_path / "table.json")
    assert table.kinds == ("v100",)
    first, second = table.row_of["A", 1], table.row_of["LM", 1]
    assert table.rates(0, (first, second)) == (2.0, 1.0)
    assert table.rates(0, (second, second)) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": "nan"}, "total_steps"),
        ({"arrival": -3}, "arrival_s"),
        ({"gpus": 0.5}, "scale_factor"),
        ({"weight": 0}, "priority_weight"),
    ],
)
def test_bad_gavel_lines(tmp_path: Path, changes: dict[str, object], field: str) -> None:
    text = _gavel_line() + "\n" + _gavel_line(**changes) + "\n"
    error = _error(tmp_path / "t.trace", text)
    assert (error.line, error.field) == (2, field)


def test_generated_traces_follow_their_seed() -> None:
    table, pool = read_table(EXAMPLES / "throughputs.csv"), Pool.parse("a100:4:40GiB")
    first = generate(table, pool, 20, seed=1, tasks_per_hour=4)
    assert first == generate(table, pool, 20, seed=1, tasks_per_hour=4)
    assert first != generate(table, pool, 20, seed=2, tasks_per_hour=4)
    assert sorted(first, key=lambda task: task.arrival_s) == first


def test_sizes() -> None:
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    assert parse_bytes("2MB") == 2_000_000
    for bad in ("", "GiB", "-1GiB", "3 parsecs"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(bad)
