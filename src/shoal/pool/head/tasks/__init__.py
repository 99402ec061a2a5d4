"""The tasks of a pool, at its head."""
