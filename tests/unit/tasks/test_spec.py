"""What a task asks for: bounds, names, arrays, and one key for one request."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks import spec as specs
from shoal.tasks.spec import Needs, SpecError, TaskSpec

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
VALUES = st.lists(st.text("abc019.-{}", min_size=1, max_size=5), min_size=1, max_size=4)


def made(**changes: object) -> TaskSpec:
    return msgspec.structs.replace(TaskSpec(["python", "t.py"], "/work"), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"program": ["python", "u.py"]},
        {"folder": "/other"},
        {"needs": Needs(devices=2)},
        {"environment": {"A": "1"}},
        {"after": ["big-1"]},
        {"until": "2h"},
        {"retries": 0},
        {"snapshot": "ab"},
    ],
)
def test_another_request_has_another_hash(changes: dict[str, object]) -> None:
    assert specs.request_hash(made()) != specs.request_hash(made(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"inherited": {"PATH": "/x"}}, {"until_at": 5.0}, {"deadline_at": 5.0}, {"machine": "m"}],
)
def test_moment_and_shell_are_not_the_request(changes: dict[str, object]) -> None:
    assert specs.request_hash(made()) == specs.request_hash(made(**changes))


def test_the_order_of_variables_is_not_the_request() -> None:
    one, other = made(environment={"A": "1", "B": "2"}), made(environment={"B": "2", "A": "1"})
    assert specs.request_hash(one) == specs.request_hash(other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "a b"}, "name"),
        ({"environment": {"1A": "x"}}, "1A"),
        ({"program": ["a\0b"]}, "zero byte"),
        ({"program": [""]}, "empty"),
        ({"folder": "here"}, "whole path"),
        ({"program": ["x"] * 20 + ["y" * specs.TEXTS_MAX]}, "KiB"),
    ],
)
def test_what_no_task_can_have(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        specs.check(made(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"program": []}, {"priority": "urgent"}, {"retries": -1}, {"limit_s": 0.0},
        {"grace_s": -1.0}, {"needs": {"devices": 0}}, {"needs": {"devices": 33}},
        {"needs": {"memory_bytes": 0}},
    ],
)  # fmt: skip
def test_the_wire_refuses_what_is_out_of_bounds(changes: dict[str, object]) -> None:
    body = msgspec.msgpack.encode({"program": ["true"], "folder": "/", **changes})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=TaskSpec)


@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_an_array_has_every_combination_once_and_in_order(each: dict[str, list[str]]) -> None:
    texts = [f"{name}={','.join(values)}" for name, values in each.items()]
    parsed = specs.parse_each(texts)
    assert parsed == list(each.items())
    found = specs.expand(made(program=["t", "{unknown}"]), parsed)
    assert len(found) == math.prod(len(v) for v in each.values())
    for one in found:
        assert all(one.environment[name] in values for name, values in each.items())
    again = specs.expand(made(program=["t", "{unknown}"]), parsed)
    assert found == again


@pytest.mark.parametrize("text", ["lr", "=1", "lr=", "lr=1,,2", "l r=1"])
def test_an_array_that_is_none(text: str) -> None:
    with pytest.raises(SpecError, match="--each"):
        specs.parse_each([text])


def test_an_array_has_a_bound() -> None:
    many = [("a", [str(i) for i in range(50)]), ("b", [str(i) for i in range(50)])]
    with pytest.raises(SpecError, match="1000"):
        specs.expand(made(), many)


@given(st.text())
def test_a_duration_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SpecError):
        assert specs.parse_duration(text) >= 0


@pytest.mark.parametrize("text", ["", "-1", "1 week", "11y", "1e5", "9999999d"])
def test_a_duration_that_is_none(text: str) -> None:
    with pytest.raises(SpecError, match=r"duration|ten years"):
        specs.parse_duration(text)


@given(st.lists(st.text(min_size=1), min_size=1))
def test_every_program_gives_a_name_and_its_id_gives_the_number(program: list[str]) -> None:
    name = specs.default_name(program)
    specs.check(made(name=name))
    assert specs.number_of(specs.task_id(name, 17)) == 17


@pytest.mark.parametrize("text", ["", "train", "train-", "train-²", "train-x"])
def test_a_text_without_a_number(text: str) -> None:
    assert specs.number_of(text) is None
