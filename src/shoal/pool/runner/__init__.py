"""The runner: starts the programs of tasks, and ends them."""
