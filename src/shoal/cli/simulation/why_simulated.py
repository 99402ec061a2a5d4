"""`shoal why --trace`: why a task of a simulation waits, and when it will run."""

from __future__ import annotations

import difflib
import math

import click
import msgspec

from shoal.schedule.allocator.explain_plan import Explanation, Reason, explain
from shoal.schedule.model.entities import Trace
from shoal.schedule.simulate.simulator import Simulation, StuckError

NAMES_SHOWN = 5


class Report(msgspec.Struct, kw_only=True):
    """What `--json` prints. Times are seconds of the trace's clock."""

    task: str
    state: str  # "waits", "runs", "has ended" or "never runs"
    arrival_s: float
    at_s: float  # the moment that was asked about
    decided_at_s: float | None = None  # start of the round that is explained
    reasons: list[Reason] = []
    unblock: list[str] = []
    starts_at_s: float | None = None  # estimates: if nobody else arrives
    ends_at_s: float | None = None
    earliest_end_s: float | None = None  # no schedule ends it sooner
    gap: float | None = None  # of the time until the estimated end, to that bound
    decision_gap: float | None = None  # of the round's plan, to the best that there could be
    started_at_s: float | None = None  # what the simulation goes on to do, with --follow
    ended_at_s: float | None = None


def find(trace: Trace, wanted: str) -> str:
    """Return the full name of the task. The ValueError for none lists similar names."""
    names = [task.name for task in trace.tasks]
    if wanted in names:
        return wanted
    numbered = [name for name in names if name.startswith(f"{wanted}: ")]
    if len(numbered) == 1:
        return numbered[0]
    near = difflib.get_close_matches(wanted, names, NAMES_SHOWN, 0.6)
    near += [name for name in names if wanted.lower() in name.lower() and name not in near]
    hint = f"did you mean {_listed(near)}?" if near else f"there are {_listed(names)}"
    raise ValueError(f"{trace.file}: no task {wanted!r}; {hint}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in names[:NAMES_SHOWN]) + more


def investigate(run: Simulation, number: int, at_s: float | None, follow: bool) -> Report:
    """Simulate up to the round that decides about the task at `at_s`, and explain it."""
    task = run.tasks[number]
    at_s = task.arrival_s if at_s is None else at_s
    report = Report(task=task.name, state="waits", arrival_s=task.arrival_s, at_s=at_s)
    explained = False
    try:
        while (decided := run.decide()) is not None:
            view, plan = decided
            if number in run.active and (not explained or view.now_s <= at_s):
                _fill(report, explain(view, plan, number), view.now_s, plan.gap)
                explained = True
            if report.started_at_s is None and any(number in a.tasks for a in plan.assignments):
                report.started_at_s = view.now_s
            run.carry_out(plan)
            end_s = float(run.result.finishes_s[number])
            if math.isfinite(end_s):
                report.ended_at_s = end_s
                break
            if explained and run.now_s > at_s and not (follow and report.state != "never runs"):
                break
    except StuckError:
        pass  # nothing else is left: the last explanation says why
    if report.ended_at_s is not None and report.ended_at_s <= at_s:
        return Report(
            task=task.name, state="has ended", arrival_s=task.arrival_s, at_s=at_s,
            started_at_s=report.started_at_s, ended_at_s=report.ended_at_s,
        )  # fmt: skip
    if not follow:
        report.started_at_s = report.ended_at_s = None
    return report


def _fill(report: Report, found: Explanation, now_s: float, decision_gap: float | None) -> None:
    report.decided_at_s = now_s
    report.reasons, report.unblock = found.reasons, found.unblock
    if found.running:
        report.state = "runs"
    else:
        report.state = "never runs" if found.earliest_end_s is None else "waits"
    report.starts_at_s = None if found.starts_in_s is None else now_s + found.starts_in_s
    report.ends_at_s = None if found.ends_in_s is None else now_s + found.ends_in_s
    report.earliest_end_s = None if found.earliest_end_s is None else now_s + found.earliest_end_s
    report.gap, report.decision_gap = found.gap, decision_gap


def show(report: Report) -> None:
    about = f"{report.task} {report.state}"
    if report.state == "has ended":
        assert report.started_at_s is not None
        assert report.ended_at_s is not None
        click.echo(f"{about}: it ran from {_at(report.started_at_s)} to {_at(report.ended_at_s)}")
        return
    if report.at_s < report.arrival_s:
        click.echo(f"{report.task} arrives at {_at(report.arrival_s)}; this is about that moment")
    assert report.decided_at_s is not None
    click.echo(f"{about} in the round that starts at {_at(report.decided_at_s)}")
    for reason in report.reasons:
        click.echo(f"  - {reason.text}")
    if report.unblock:
        click.echo("what would help:")
        for remedy in report.unblock:
            click.echo(f"  - {remedy}")
    if report.ends_at_s is not None and report.starts_at_s is not None:
        starts = "" if report.state == "runs" else f"starts about {_at(report.starts_at_s)}, "
        click.echo(f"estimate: {starts}ends about {_at(report.ends_at_s)}, if nobody else arrives")
    if report.earliest_end_s is not None:
        above = "" if report.gap is None else f"; the estimate takes {report.gap:.0%} longer"
        click.echo(f"bound: no schedule ends it before {_at(report.earliest_end_s)}{above}")
    if report.decision_gap is not None:
        click.echo(f"this decision is within {report.decision_gap:.2%} of the best there could be")
    if report.started_at_s is not None:
        ended = "" if report.ended_at_s is None else f" and ends at {_at(report.ended_at_s)}"
        click.echo(f"in the simulation it first runs at {_at(report.started_at_s)}{ended}")


def _at(seconds: float) -> str:
    """Return a time as seconds for `--at` and hours for people."""
    return f"{seconds:.0f} s ({seconds / 3600:.2f} h)"
