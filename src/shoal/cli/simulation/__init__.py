"""Simulated tasks: `shoal simulate`, and what `shoal why --trace` has in common with it."""
