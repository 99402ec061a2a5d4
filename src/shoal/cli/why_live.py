"""`shoal why` of a live pool: asks the head and shows its answer."""

from __future__ import annotations

import time
from typing import Any

import click

from shoal.cli.common import ago, ask, iso, print_json
from shoal.pool.base.limits import DEVICES_PER_LEASE_MAX
from shoal.pool.wire import admission_messages
from shoal.tasks.reasons import Why
from shoal.units import parse_bytes

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class BadValue(click.ClickException):
    exit_code = 2


def show(url: str, request: str, what_if: tuple[str, ...], as_json: bool) -> bool:
    """Print why a request waits. Return False if it never runs as the pool is."""
    answer = ask(url, _question(request, what_if), admission_messages.WhyAnswer)
    if as_json:
        print_json(as_data(answer.why))
    else:
        _print(answer, bool(what_if))
    return not answer.why.never


def as_data(why: Why) -> dict[str, Any]:
    """Return what `--json` prints. Times are ISO 8601, UTC."""
    estimate, bound = why.estimate, why.bound
    return {
        "never": why.never,
        "reasons": [
            {"code": r.code, "text": r.text, "numbers": r.numbers} for r in why.reasons
        ],
        "unblock": why.unblock,
        "estimate": estimate and {
            "start": iso(estimate.start), "end": _iso(estimate.end),
            "error_ratio": estimate.error_ratio,
        },
        "bound": bound and {
            "start": iso(bound.start), "end": _iso(bound.end), "assumes": bound.assumes,
        },
    }  # fmt: skip


def _iso(at: float | None) -> str | None:
    return None if at is None else iso(at)


def _question(request: str, what_if: tuple[str, ...]) -> admission_messages.AskWhy:
    fields: dict[str, Any] = {}
    for text in what_if:
        name, equals, value = text.partition("=")
        try:
            if not equals:
                raise ValueError
            match name.strip():
                case "memory":
                    fields["memory_bytes"] = parse_bytes(value)
                case "devices":
                    fields["devices"] = int(value)
                    if not 1 <= fields["devices"] <= DEVICES_PER_LEASE_MAX:
                        raise ValueError
                case "kind" if value.strip():
                    fields["kind"] = value
                case "limit":
                    fields["limit_s"] = _seconds(value)
                case _:
                    raise ValueError
        except ValueError:
            raise BadValue(
                f"--if {text!r}: write memory=8GiB, devices=1 to {DEVICES_PER_LEASE_MAX}, kind=a100 "
                "or limit=10m"
            ) from None
    return admission_messages.AskWhy(request, **fields)


def _seconds(text: str) -> float:
    number = text.strip().rstrip("smindh")
    unit = text.strip()[len(number) :] or "s"
    seconds = float(number) * _UNITS_S.get(unit, 0.0)
    if not 0 < seconds < 10 * 365 * 86400:
        raise ValueError
    return seconds


def _print(answer: admission_messages.WhyAnswer, supposed: bool) -> None:
    why = answer.why
    state = {"waiting": "waits", "running": "has its devices", "held": "is held"}
    verb = state.get(answer.state, f"is {answer.state}")
    click.echo(f"{answer.request} {verb}" + (", if it had asked for that:" if supposed else ""))
    show_why(why)


def show_why(why: Why) -> None:
    """Print reasons, what would help, estimate and bound."""
    for reason in why.reasons:
        click.echo(f"  - {reason.text}")
    if why.unblock:
        click.echo("what would help:")
    for remedy in why.unblock:
        command = f": {remedy.command}" if remedy.command else ""
        click.echo(f"  - {remedy.text}{command}")
    now = time.time()
    if why.never:
        click.echo(
            "the pool as it is now can never run it; it keeps waiting, because nodes may join"
        )
    if why.estimate is not None:
        off = why.estimate.error_ratio
        error = "" if off is None else f" (past estimates were off by {off:.0%})"
        click.echo(
            f"estimate: starts {_at(why.estimate.start, now)}{_ends(why.estimate.end, now)}, if "
            f"nobody else comes{error}"
        )
    if why.bound is not None:
        click.echo(
            f"bound: starts {_at(why.bound.start, now)} at the earliest{_ends(why.bound.end, now)}, "
            f"if {why.bound.assumes}"
        )


def _at(at: float, now: float) -> str:
    return "now" if at <= now + 1 else f"in {ago(at - now)}"


def _ends(at: float | None, now: float) -> str:
    return "" if at is None else f", ends {_at(at, now)}"
