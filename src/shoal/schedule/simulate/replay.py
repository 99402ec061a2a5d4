"""Runs a recorded day again: each decision as it was asked, and the whole day as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.schedule.allocator.policy import Plan, Policy, policies
from shoal.schedule.formats import views
from shoal.schedule.formats.records import Question, Record
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Group, Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import check


@dataclass(frozen=True, slots=True)
class Replayed:
    """How the rounds of a record compare with the same questions asked now."""

    rounds: int
    by_planner: int  # the others were decided without it
    equal: int  # of those, as they are decided now


def policy_of(question: Question) -> Policy:
    """Return the policy that was asked. Raises ValueError if it does not exist any more."""
    known = policies().get(question.policy)
    if known is None:
        raise ValueError(f"the record asks policy {question.policy!r}, which does not exist")
    return Shoal(question.balance) if known is Shoal else known()


def decide_again(question: Question) -> Plan:
    """Return the checked plan of a question, from a policy that remembers what it did then."""
    view = views.from_fields(question.view)
    policy = policy_of(question)
    policy.restore(question.memory, view)
    plan = policy.decide(view)
    check(view, plan)
    return plan


def replay(records: Sequence[Record]) -> Replayed:
    """Ask each question again."""
    asked = [record for record in records if record.source == "planner"]
    equal = sum(
        sorted(views.plan_to_fields(decide_again(r.question)).assignments)
        == sorted(r.carried_out.assignments)
        for r in asked
    )
    return Replayed(len(records), len(asked), equal)


def day(records: Sequence[Record]) -> tuple[Pool, Throughputs, list[Task]]:
    """Return a recorded day as a pool, a table and a trace: each as it was known last."""
    if not records or not any(record.question.view.tasks for record in records):
        raise ValueError("the record has no tasks")
    last = views.from_fields(records[-1].question.view)
    kinds = last.pool.names
    alone: dict[tuple[str, int], list[float]] = {}
    memory: dict[tuple[str, int], list[float]] = {}
    busy: dict[tuple[str, int], list[list[float]]] = {}
    pairs: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[float, ...]] = {}
    tasks: dict[int, Task] = {}
    most = list(last.pool.kinds)  # a round has only the devices that it could decide about
    for record in records:
        view = views.from_fields(record.question.view)
        if view.pool.names != kinds:
            continue  # devices came or went: what was known of them is in the other rounds
        table = view.table
        for row, key in enumerate(table.rows):
            alone[key] = table.alone[row].tolist()
            memory[key] = table.memory_bytes[row].tolist()
            busy[key] = table.busy[row].tolist()
        for (kind, group), rates in table.measured.items():
            pairs[kind, tuple(table.rows[row] for row in group)] = rates
        most = [
            max(pair, key=lambda k: k.count) for pair in zip(most, view.pool.kinds, strict=True)
        ]
        for state in view.tasks:  # one that has started stays on its kind
            first = tasks.get(state.id, state.task)
            tasks[state.id] = replace(state.task, kinds=first.kinds)
    rows = list(alone)
    measured: dict[tuple[int, Group], tuple[float, ...]] = {}
    for (kind, names), rates in pairs.items():
        ordered = sorted(zip((rows.index(name) for name in names), rates, strict=True))
        measured[kind, tuple(row for row, _ in ordered)] = tuple(rate for _, rate in ordered)
    table = Throughputs(
        kinds,
        rows,
        np.array([alone[key] for key in rows]),
        np.array([memory[key] for key in rows]),
        np.array([busy[key] for key in rows]),
        measured,
        source="record",
        unknown_shares=last.table.unknown_shares,
    )
    return Pool(tuple(most), last.pool.quotas), table, [task for _, task in sorted(tasks.items())]
