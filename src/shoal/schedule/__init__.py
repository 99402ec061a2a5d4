"""Which tasks run on which devices, and why."""
