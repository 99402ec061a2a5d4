"""Entry point of the `shoal` command. Verbs are imported when they are called, so `--help` is quick."""

from __future__ import annotations

import importlib

import click

#: verb -> "module:attribute" of its click command.
VERBS = {
    "simulate": "shoal.cli.simulate:simulate",
}


class LazyGroup(click.Group):
    """A click group that imports a verb's module only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = VERBS.get(cmd_name)
        if target is None:
            return None
        module_name, attribute = target.split(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Shoal: the GPUs of many machines as one PyTorch device."""
