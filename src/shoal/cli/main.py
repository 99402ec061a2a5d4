"""Entry point of the `shoal` command. Verbs are imported when they are called, so `--help` is quick."""

from __future__ import annotations

import errno
import importlib
import os

import click

#: verb -> "module:attribute" of its click command, and what `shoal --help` says of it.
VERBS = {
    "up": ("shoal.cli.up:up", "Start a pool on this machine."),
    "down": ("shoal.cli.up:down", "End a pool that runs on this machine."),
    "node": ("shoal.cli.up:node", "Add this machine's devices to a pool elsewhere."),
    "join": ("shoal.cli.access:join", "Make this machine a client of a pool elsewhere."),
    "code": ("shoal.cli.access:code", "Print a code with which one client or node can join."),
    "clients": ("shoal.cli.access:clients", "Who has joined the pool."),
    "revoke": ("shoal.cli.access:revoke", "Throw a client or node out."),
    "audit": ("shoal.cli.access:audit", "What happened in the pool, newest last."),
    "status": ("shoal.cli.status:status", "The pool, its nodes, devices and sessions."),
    "devices": (
        "shoal.cli.devices:devices",
        "The pool's devices: free memory and measured speed.",
    ),
    "top": ("shoal.cli.top:top", "The pool live: devices, memory, calls and bytes a second."),
    "doctor": ("shoal.cli.doctor:doctor", "Find what is wrong with an installation or connection."),
    "simulate": ("shoal.cli.simulate:simulate", "Simulate a trace of tasks on a pool."),
    "why": ("shoal.cli.why:why", "Why a task of a simulated pool waits, and when it will run."),
    "version": ("shoal.cli.main:version", "Print the version."),
}
INTERRUPTED = 130  # what shells return for a program that Ctrl-C ended


class LazyGroup(click.Group):
    """A click group that imports a verb's module only when the verb is used."""

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
        """Whatever goes wrong is one message; SHOAL_DEBUG=1 shows where it came from."""
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
                raise click.ClickException(str(error)) from None
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # nobody reads on: click ends without a word
            raise click.ClickException(_unexpected(error)) from None


def _did_you_mean(typed: str) -> str:
    import difflib

    near = difflib.get_close_matches(typed, VERBS, n=1)
    return f" Did you mean `shoal {near[0]}`?" if near else ""


def _unexpected(error: Exception) -> str:
    from shoal.errors import describe

    text = describe(error)
    if not isinstance(error, OSError):
        text = f"this is a bug in Shoal: {text}"
    return f"{text}. SHOAL_DEBUG=1 shows where."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal", message="shoal %(version)s")
def main() -> None:
    """Shoal: the GPUs of many machines as one PyTorch device."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version."""
    import shoal

    number = shoal.__version__
    click.echo(f'{{"shoal":"{number}"}}' if as_json else f"shoal {number}")


if __name__ == "__main__":
    main(prog_name="shoal")
