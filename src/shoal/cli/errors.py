"""Errors of commands: a text, what a program can read of it, and an exit code."""

from __future__ import annotations

import click

from shoal.tasks import states


class Failed(click.ClickException):
    """An error of Shoal's own, with what a program can read of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.code = str(getattr(error, "code", "")) or "error"
        self.unblock = list(getattr(error, "unblock", ()))

    def format_message(self) -> str:
        return "\n".join([self.message, *(f"  what would help: {text}" for text in self.unblock)])


class WrongRequest(Failed):
    """What was asked for cannot be right, whatever the pool is like."""

    exit_code = 2


class ShoalFailed(Failed):
    """A failure of Shoal's own, in a command that else exits with a program's code."""

    exit_code = states.EXIT_SHOAL
