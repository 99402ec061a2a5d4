"""Entry point of the `shoal` command. Verbs are imported when they are called, so `--help` is quick."""

from __future__ import annotations

import importlib

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
    "status": ("shoal.cli.look:status", "The pool, its nodes, devices and sessions."),
    "devices": (
        "shoal.cli.devices:devices",
        "The pool's devices: free memory and measured speed.",
    ),
    "top": ("shoal.cli.top:top", "The pool live: devices, memory, calls and bytes a second."),
    "doctor": ("shoal.cli.doctor:doctor", "Find what is wrong with an installation or connection."),
    "simulate": ("shoal.cli.simulate:simulate", "Simulate a trace of tasks on a pool."),
    "why": ("shoal.cli.why:why", "Why a task of a simulated pool waits, and when it will run."),
}


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

    def invoke(self, ctx: click.Context) -> object:
        from shoal.errors import ShoalError

        try:
            return super().invoke(ctx)
        except ShoalError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal", message="shoal %(version)s")
def main() -> None:
    """Shoal: the GPUs of many machines as one PyTorch device."""


if __name__ == "__main__":
    main(prog_name="shoal")
