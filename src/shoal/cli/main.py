"""Entry point of the `shoal` command. It imports a command's module on use, so `--help` is quick."""

from __future__ import annotations

import errno
import importlib
import os

import click

#: command -> "module:attribute" of its click command, and its line in `shoal --help`.
VERBS = {
    "up": ("shoal.cli.up:up", "Start a pool on this machine."),
    "down": ("shoal.cli.up:down", "End a pool or node on this machine."),
    "node": ("shoal.cli.node:node", "Add this machine's devices to a remote pool."),
    "join": ("shoal.cli.access:join", "Make this machine a client of a remote pool."),
    "code": ("shoal.cli.access:code", "Print a code with which one client or node can join."),
    "clients": ("shoal.cli.access:clients", "List the clients and nodes of the pool."),
    "revoke": ("shoal.cli.access:revoke", "Remove a client or node from the pool."),
    "audit": ("shoal.cli.access:audit", "List the pool's events, newest last."),
    "status": ("shoal.cli.status:status", "Show the pool, its nodes, devices and sessions."),
    "devices": ("shoal.cli.devices:devices", "List the pool's devices, free memory and speed."),
    "top": ("shoal.cli.top:top", "Show devices, memory, calls and bytes per second, live."),
    "doctor": ("shoal.cli.doctor:doctor", "Find faults of an installation or connection."),
    "simulate": ("shoal.cli.simulate:simulate", "Simulate a trace of tasks on a pool."),
    "why": ("shoal.cli.why:why", "Explain why a task of a simulated pool waits."),
    "version": ("shoal.cli.main:version", "Print the version."),
}
INTERRUPTED = 130  # exit code of a program that Ctrl-C ended


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is used."""

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
                raise  # nobody reads stdout: click exits silently
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
