"""A program that has Shoal installed and has not asked for it: torch answers as if it were alone."""

from __future__ import annotations

import functools
import re
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.ecosystem import programs, questions

#: Nothing listens there: a program that opened it would raise, or wait.
UNREACHABLE = "shoal://127.0.0.1:1"
#: How a program comes to be a guest.
GUESTS: dict[str, dict[str, str]] = {
    "not asked": {},
    "SHOAL_DEFAULT=0": {"SHOAL_DEFAULT": "0", "SHOAL_POOL": UNREACHABLE},
}
#: For one batch of questions. The slowest takes 5 s on a quiet machine.
BATCH_S = 300.0
#: The first question of a batch waits for three processes, two at a time.
pytestmark = pytest.mark.timeout(3 * BATCH_S)

Result = dict[str, Any]


@functools.cache
def _answers(batch: str) -> dict[str, Future[dict[str, Result]]]:
    """Ask one batch without Shoal and as each kind of guest; two processes run at a time."""
    asked = {**questions.BATCHES, "known": _known()}[batch]
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(programs.ask, asked, installed=False, timeout_s=BATCH_S)
        guests = {
            kind: pool.submit(programs.ask, asked, env=env, timeout_s=BATCH_S)
            for kind, env in GUESTS.items()
        }
    return {"alone": alone, **guests}


def _known() -> dict[str, str]:
    return {name: source for name, (source, _) in questions.KNOWN_DIFFERENCES.items()}


def _comparable(value: Any) -> Any:
    """Leave out what differs between any two processes: addresses, numbers of processes, files."""
    if isinstance(value, str):
        value = re.sub(re.escape(tempfile.gettempdir()) + r"/[\w./-]*", "<file>", value)
        return re.sub(r"0x[0-9a-f]+|\b\d{5,}\b", "<number>", value)
    if isinstance(value, list):
        return [_comparable(v) for v in value]
    if isinstance(value, dict):
        return {k: _comparable(v) for k, v in value.items()}
    return value


@pytest.mark.parametrize("kind", GUESTS)
@pytest.mark.parametrize(
    ("batch", "name"),
    [
        pytest.param(batch, name, id=f"{batch}: {name}")
        for batch, asked in questions.BATCHES.items()
        for name in asked
    ],
)
def test_a_guest_gets_the_answer_of_torch_alone(batch: str, name: str, kind: str) -> None:
    found = _answers(batch)
    alone, guest = found["alone"].result()[name], found[kind].result()[name]
    for part in ("error", "answer", "warnings", "threads", "files", "connections", "started"):
        assert _comparable(guest[part]) == _comparable(alone[part]), part
    assert len(guest["children"]) == len(alone["children"])
    assert guest["modules"] == []


@pytest.mark.parametrize("kind", GUESTS)
@pytest.mark.parametrize("name", questions.KNOWN_DIFFERENCES)
def test_a_known_difference_is_one(name: str, kind: str) -> None:
    """What has become equal belongs to the questions above."""
    found = _answers("known")
    alone, guest = found["alone"].result()[name], found[kind].result()[name]
    assert (guest["error"], guest["answer"]) != (alone["error"], alone["answer"])
    if name in questions.ONLY_THE_TEXT:
        assert guest["error"]["type"] == alone["error"]["type"]
        assert guest["started"] == []


@pytest.mark.slow
def test_inductor_on_the_cpu() -> None:
    alone = programs.ask(questions.INDUCTOR, installed=False)["torch.compile"]
    guest = programs.ask(questions.INDUCTOR)["torch.compile"]
    assert guest["error"] is None
    assert guest["answer"] == alone["answer"]
    # How often inductor calls the compiler varies by one; what it starts does not.
    commands = {line.split()[0] for line in guest["started"]}
    assert commands == {line.split()[0] for line in alone["started"]}
    assert guest["modules"] == []
