"""Figures of the scheduler: `python -m bench.schedule`."""
