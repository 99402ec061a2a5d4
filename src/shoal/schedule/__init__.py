"""Decides which tasks run on which devices, and explains why.

`Shoal().decide(view)` gives a plan, `explain(view, plan, task)` its reasons, `Simulation(…).run()` what
it would lead to. docs/scheduling.md is the guide.
"""
