"""`shoal event`, `enrol` and `approve`: enrol by a code on a screen; a rule grants places."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

import click

from shoal.cli.common import ago, ask, json_option, pool_option, pool_url, print_json, print_table
from shoal.errors import PoolError
from shoal.people import rules
from shoal.people.draw import ENTRIES_MAX, PLACES_MAX, TICKETS_MAX
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.units import parse_bytes

_RULE = click.Choice(rules.RULES)
_APPROVAL = click.Choice(["everyone", "members", "hand"])
MINUTES = click.FloatRange(0, 7 * 24 * 60, min_open=True)
event_argument = click.argument("event", metavar="EVENT")


@click.group()
def event() -> None:
    """Open an event, and grant places by a rule. EVENT is its number or its title."""


def find(url: str, wanted: str) -> people.EventInfo:
    """Return the newest event with this number or title."""
    after: str | None = None
    while True:
        page = ask(url, people.ListEvents(after), people.EventList)
        for one in page.events:
            if wanted.upper() == one.event or wanted == one.title:
                return one
        if not page.more:
            raise PoolError(f"there is no event {wanted!r}. `shoal event list` shows all of them.")
        after = page.events[-1].event


def _closing_time(text: str) -> float:
    """Return the Unix time of "15:00", "2026-11-18T15:00" or "20m"."""
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found:
        return time.time() + int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    for form in ("%H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            parsed = time.strptime(text, form)
        except ValueError:
            continue
        if form != "%H:%M":
            return time.mktime(parsed)
        now = time.localtime()
        at = time.mktime((*now[:3], parsed.tm_hour, parsed.tm_min, 0, 0, 0, -1))
        return at if at > time.time() else at + 86400
    raise click.ClickException(f"--closes: write 15:00, 2026-11-18T15:00 or 20m (got {text!r})")


@event.command("open")
@click.argument("title")
@click.option("--places", type=click.IntRange(1, PLACES_MAX), default=1, show_default=True,
              help="Number of requests to grant.")  # fmt: skip
@click.option(
    "--rule",
    type=_RULE,
    default="draw",
    show_default=True,
    help="Rule that chooses among requests.",
)
@click.option("--closes", metavar="TIME", help="Close at 15:00, 2026-11-18T15:00, or in 20m.")
@click.option(
    "--when-free", type=click.IntRange(1), metavar="N", help="Close when N devices are free."
)
@click.option(
    "--when-asked", type=click.IntRange(1), metavar="N", help="Close when N requests are there."
)
@click.option("--approval", type=_APPROVAL, default="everyone", show_default=True,
              help="People whom the code admits; all others wait for `shoal approve`.")  # fmt: skip
@click.option(
    "--capacity",
    type=click.IntRange(1, ENTRIES_MAX),
    default=ENTRIES_MAX,
    show_default=True,
    help="Most people who can enrol.",
)
@click.option("--devices", type=click.IntRange(1, 32), default=1, show_default=True,
              help="Devices of each grant.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Memory of each device, like 8GiB.")
@click.option("--minutes", type=MINUTES, default=60.0, show_default=True,
              help="Minutes of each grant.")  # fmt: skip
@pool_option
@json_option
def open_event(
    title: str, places: int, rule: rules.Rule, closes: str | None, when_free: int | None,
    when_asked: int | None, approval: str, capacity: int, devices: int, memory: str | None,
    minutes: float, pool: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Open an event; `shoal event show` prints the code of its screen.

    \b
    shoal event open "GPU hour" --places 2 --closes 15:00
    """
    url = pool_url(pool)
    values = (
        ("time", _closing_time(closes) if closes else None), ("devices", when_free),
        ("requests", when_asked),
    )  # fmt: skip
    conditions = [people.EventCondition(k, float(v)) for k, v in values if v is not None]  # type: ignore[arg-type]
    made = ask(
        url,
        people.OpenEvent(
            title, places, rule, conditions, approval, capacity, devices,  # type: ignore[arg-type]
            parse_bytes(memory) if memory else None, minutes,
        ),
        people.EventInfo,
    )  # fmt: skip
    _print(url, made, as_json)


@event.command("list")
@pool_option
@json_option
def list_events(pool: str | None, as_json: bool) -> None:
    """List all events, the newest first."""
    url = pool_url(pool)
    found: list[people.EventInfo] = []
    more = True
    while more:
        page = ask(url, people.ListEvents(found[-1].event if found else None), people.EventList)
        found += page.events
        more = page.more
    if as_json:
        print_json(found)
        return
    rows = [
        [e.event, e.title, e.state, e.rule, str(e.places), str(e.enrolled), str(e.requests),
         ", ".join(e.winners[:5])]
        for e in found
    ]  # fmt: skip
    print_table(
        ["event", "title", "state", "rule", "places", "enrolled", "requests", "granted"], rows
    )


@event.command()
@event_argument
@pool_option
@json_option
def show(event: str, pool: str | None, as_json: bool) -> None:
    """Show an event, its people, and the code of its screen."""
    url = pool_url(pool)
    _print(url, _whole(url, find(url, event).event), as_json)


def _whole(url: str, number: str) -> people.EventInfo:
    """Return an event with all its people."""
    found = ask(url, people.ShowEvent(number), people.EventInfo)
    page = found
    while page.more:
        page = ask(url, people.ShowEvent(number, len(found.people)), people.EventInfo)
        found.people.extend(page.people)
    return found


def _print(url: str, found: people.EventInfo, as_json: bool) -> None:
    screen = None
    if found.state == "open":
        try:
            screen = ask(url, people.ShowScreen(found.event), people.Screen)
        except PoolError:
            screen = None  # only an admin sees it
    if as_json:
        print_json({"event": found, "screen": screen})
        return
    click.echo(
        f'{found.event} "{found.title}" is {found.state}: {found.places} place(s) by {found.rule}'
    )
    click.echo(f"closes {found.closes}")
    if found.commitment:
        click.echo(f"commitment {found.commitment}")
    if screen is not None:
        from shoal.people import qr

        click.echo(qr.terminal(screen.code))
        click.echo(f"shoal enrol {screen.code}    (another code in {ago(screen.valid_s)})")
    click.echo(
        f"{found.enrolled} enrolled, {found.waiting} wait for approval, {found.requests} requests"
        + (
            f", {found.remaining} took part, {found.struck_out} struck out"
            if found.closed_at
            else ""
        )
    )
    if found.mine is not None and found.mine.grant is not None:
        _print_grant(found.mine.grant)
    if found.people:
        rows = [
            [p.name, p.standing or "not enrolled", "yes" if p.asked else "-", str(p.tickets),
             str(p.rank) if p.rank else "-", p.ended or "-", p.reason or p.grant or ""]
            for p in found.people
        ]  # fmt: skip
        print_table(["name", "standing", "asked", "tickets", "rank", "ended", "more"], rows)


def _print_grant(grant: people.GrantInfo) -> None:
    """Say what the asker was granted, and how to use it."""
    if grant.state == "waiting":
        click.echo("you have a place; it waits for devices, and its time has not begun")
        for reason in grant.reasons:
            click.echo(f"  - {reason}")
    elif grant.state == "open" and grant.until is not None:
        left = ago(grant.until - time.time())
        click.echo(
            f"you have a place: {', '.join(grant.devices)} for {left}. Your next program gets it"
        )
    elif grant.state == "over":
        click.echo("your place is over")


@event.command()
@event_argument
@pool_option
@json_option
def close(event: str, pool: str | None, as_json: bool) -> None:
    """Fix the list of an event now."""
    url = pool_url(pool)
    _print(url, ask(url, people.CloseEvent(find(url, event).event), people.EventInfo), as_json)


@event.command()
@event_argument
@click.option("--proof", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the proof of the draw to this file.")  # fmt: skip
@pool_option
@json_option
def draw(event: str, proof: Path | None, pool: str | None, as_json: bool) -> None:
    """Make the result now; close the event first if it is open."""
    url = pool_url(pool)
    found = find(url, event)
    if found.state != "done":
        found = ask(url, people.DrawEvent(found.event), people.EventInfo)
    if proof is not None:
        proof.write_text(
            ask(url, people.AskProof(found.event), people.ProofText).text, encoding="utf-8"
        )
    _print(url, _whole(url, found.event), as_json)


@event.command()
@event_argument
@pool_option
@json_option
def cancel(event: str, pool: str | None, as_json: bool) -> None:
    """End an event without a result."""
    url = pool_url(pool)
    _print(url, ask(url, people.CancelEvent(find(url, event).event), people.EventInfo), as_json)


@event.command()
@event_argument
@click.option("--bytes", "own", metavar="HEX", help="Your 16 bytes for the draw. Default: random.")
@click.option(
    "--minutes", type=MINUTES, help="Minutes to ask for. Default: all that a grant gives."
)
@click.option("--withdraw", is_flag=True, help="Take the request back.")
@pool_option
@json_option
def request(
    event: str, own: str | None, minutes: float | None, withdraw: bool, pool: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Ask for a place. Keep the receipt: it proves that your request was there."""
    url = pool_url(pool)
    number = find(url, event).event
    if withdraw:
        _print(url, ask(url, people.WithdrawPlace(number), people.EventInfo), as_json)
        return
    mine = own or secrets.token_hex(16)
    found = ask(url, people.AskPlace(number, mine, minutes), people.Receipt)
    if as_json:
        print_json({"event": number, "receipt": found.receipt, "commitment": found.commitment,
                    "bytes": mine})  # fmt: skip
        return
    click.echo(f"receipt    {found.receipt}")
    if found.commitment:
        click.echo(f"commitment {found.commitment}")
        click.echo(
            "After the draw: shoal draw verify PROOF --commitment … --receipt … with these two."
        )


@click.command()
@click.argument("code")
@click.option("--request/--no-request", "wanted", default=True, help="Also ask for a place.")
@pool_option
@json_option
def enrol(code: str, wanted: bool, pool: str | None, as_json: bool) -> None:
    """Enrol for the event whose screen shows this CODE, and ask for a place."""
    url = pool_url(pool)
    found = ask(url, people.Enrol(code), people.Enrolled)
    receipt = None
    if wanted:
        receipt = ask(url, people.AskPlace(found.event, secrets.token_hex(16)), people.Receipt)
    if as_json:
        print_json({"event": found.event, "title": found.title, "name": found.name,
                    "standing": found.standing, "commitment": found.commitment,
                    "receipt": receipt.receipt if receipt else None})  # fmt: skip
        return
    click.echo(f'{found.name} is enrolled for "{found.title}": {found.standing}')
    if receipt is not None:
        click.echo(f"receipt    {receipt.receipt}")
    if found.commitment:
        click.echo(f"commitment {found.commitment}")


@click.command()
@click.argument("who", metavar="NAME|DIGITS")
@click.option("--event", "wanted", help="Event. Default: every open one where NAME waits.")
@click.option("--tickets", type=click.IntRange(1, TICKETS_MAX), default=1, show_default=True,
              help="Tickets of NAME in the draw.")  # fmt: skip
@click.option("--refuse", is_flag=True, help="Refuse NAME instead.")
@pool_option
@json_option
def approve(
    who: str, wanted: str | None, tickets: int, refuse: bool, pool: str | None, as_json: bool
) -> None:
    """Approve an entrant of an event, or sign in a browser that shows six DIGITS.

    \b
    shoal approve eva-laptop
    shoal approve 493-201
    """
    url = pool_url(pool)
    digits = who.replace("-", "").replace(" ", "")
    if len(digits) == 6 and digits.isdecimal():
        done = ask(url, people.ApproveBrowser(digits), messages.Done)
        print_json({"approved": who, "text": done.text}) if as_json else click.echo(done.text)
        return
    decided = []
    for one in (
        [find(url, wanted)] if wanted else ask(url, people.ListEvents(), people.EventList).events
    ):
        waits = any(
            p.name == who and p.standing == "waiting" for p in _whole(url, one.event).people
        )
        if one.state == "open" and (waits or wanted):
            ask(url, people.Decide(one.event, who, not refuse, tickets), people.EventInfo)
            decided.append(one.event)
    if not decided:
        raise PoolError(
            f"{who} does not wait for approval in any open event. `shoal event list` shows the events."
        )
    if as_json:
        print_json({"name": who, "approved": not refuse, "events": decided})
    else:
        click.echo(f"{who} is {'refused' if refuse else 'approved'} for {', '.join(decided)}")
