"""The `shoal` command: one file per verb family."""
