"""Entry point of the `shoal` command. It imports a command's module on use, so `--help` is quick."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

#: command -> "module:attribute" of its click command, and its line in `shoal --help`.
VERBS = {
    "up": ("shoal.cli.up:up", "Start a pool on this machine."),
    "down": ("shoal.cli.up:down", "End a pool or node on this machine."),
    "node": ("shoal.cli.node:node", "Add this machine's devices to a remote pool."),
    "join": ("shoal.cli.join:join", "Make this machine a client of a remote pool."),
    "code": ("shoal.cli.members:code", "Print a code with which one client or node can join."),
    "clients": ("shoal.cli.members:clients", "List the clients and nodes of the pool."),
    "revoke": ("shoal.cli.members:revoke", "Remove a client or node from the pool."),
    "audit": ("shoal.cli.audit:audit", "List what happened in the pool, newest last."),
    "status": ("shoal.cli.status:status", "Show the pool, its nodes, devices and sessions."),
    "devices": ("shoal.cli.devices:devices", "List the pool's devices, free memory and speed."),
    "top": ("shoal.cli.top:top", "Show devices, memory, calls and bytes per second, live."),
    "submit": (
        "shoal.cli.tasks.submit:submit",
        "Have the pool run a program when devices are free.",
    ),
    "run": ("shoal.cli.tasks.run:run", "Run a program here; only its lease waits."),
    "queue": ("shoal.cli.tasks.queue:queue", "List the tasks of the pool."),
    "logs": ("shoal.cli.tasks.logs:logs", "Print what a task has written."),
    "wait": ("shoal.cli.tasks.queue:wait", "Wait for a task, and exit with its program's code."),
    "cancel": ("shoal.cli.tasks.queue:cancel", "End a task."),
    "hold": ("shoal.cli.tasks.queue:hold", "Keep a waiting task from starting."),
    "release": ("shoal.cli.tasks.queue:release", "Let a held task go on."),
    "fetch": ("shoal.cli.tasks.logs:fetch", "Bring results of a task."),
    "runner": ("shoal.cli.tasks.runner:runner", "Run your tasks on this machine."),
    "doctor": ("shoal.cli.doctor:doctor", "Find faults of an installation or connection."),
    "simulate": ("shoal.cli.simulation.simulate:simulate", "Simulate a trace of tasks on a pool."),
    "dump": ("shoal.cli.dump:dump", "Write what a pool decided, to simulate it elsewhere."),
    "why": ("shoal.cli.why:why", "Explain why a task or lease waits, live or in a trace."),
    "open": ("shoal.cli.web:open_dashboard", "Open the dashboard in your browser, signed in."),
    "event": ("shoal.cli.event:event", "Open an event, and grant places by a rule."),
    "enrol": ("shoal.cli.event:enrol", "Enrol for the event whose screen shows a code."),
    "approve": ("shoal.cli.event:approve", "Approve an entrant, or sign in a browser."),
    "token": ("shoal.cli.web:token", "Make, list and end tokens for the HTTP API."),
    "draw": ("shoal.cli.draw:draw", "Check the draw of an event."),
    "version": ("shoal.cli.main:version", "Print the version."),
}
#: Codes of errors for which a command exits with 2, as for wrong options.
REQUEST_CODES = {"key-conflict", "bad-request"}
INTERRUPTED = 130  # exit code of a program that Ctrl-C ended


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is used."""

    def main(self, args: Any = None, *rest: Any, **named: Any) -> Any:
        """Print errors as JSON too, if the command is to print JSON."""
        given = list(sys.argv[1:] if args is None else args)
        if not named.get("standalone_mode", True) or not _wants_json(given):
            return super().main(given, *rest, **named)
        try:
            code = super().main(given, *rest, **{**named, "standalone_mode": False})
        except click.ClickException as error:
            _print_error(error)
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # nobody reads stdout
            os._exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = VERBS.get(cmd_name)
        if known is None:
            return None
        module_name, attribute = known[0].split(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not args or args[0] in VERBS:
                raise
            raise click.UsageError(error.message + _did_you_mean(args[0]), ctx) from None

    def invoke(self, ctx: click.Context) -> object:
        """Turn every error into one message; SHOAL_DEBUG=1 shows the traceback."""
        from shoal.cli.errors import Failed, WrongRequest
        from shoal.errors import ShoalError

        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if os.environ.get("SHOAL_DEBUG") == "1":
                raise
            if isinstance(error, ShoalError):
                wrong = getattr(error, "code", "") in REQUEST_CODES
                raise (WrongRequest if wrong else Failed)(error) from None
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # nobody reads stdout: click exits silently
            raise click.ClickException(_unexpected(error)) from None


def _wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command is to print JSON. What follows `--` belongs to a task's program."""
    own = itertools.takewhile(lambda word: word != "--", arguments)
    return "--json" in own


def _print_error(error: click.ClickException) -> None:
    import json

    code = getattr(error, "code", "usage" if isinstance(error, click.UsageError) else "error")
    text, unblock = error.message, getattr(error, "unblock", [])
    if isinstance(error, click.UsageError):  # its form names the option
        path = error.ctx.command_path if error.ctx is not None else "shoal"
        text, unblock = error.format_message(), [f"{path} --help"]
    found = {"code": code, "text": text, "unblock": unblock}
    click.echo(json.dumps({"error": found}))


def _did_you_mean(typed: str) -> str:
    import difflib

    near = difflib.get_close_matches(typed, VERBS, n=1)
    return f" Did you mean `shoal {near[0]}`?" if near else ""


def _unexpected(error: Exception) -> str:
    from shoal.errors import describe

    text = describe(error)
    if not isinstance(error, OSError):
        text = f"this is a bug in Shoal: {text}"
    return f"{text}. SHOAL_DEBUG=1 shows the traceback."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal", message="shoal %(version)s")
def main() -> None:
    """Shoal: a PyTorch device that runs operators in worker processes, local or remote."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version."""
    import shoal

    number = shoal.__version__
    click.echo(f'{{"shoal":"{number}"}}' if as_json else f"shoal {number}")


if __name__ == "__main__":
    main(prog_name="shoal")
