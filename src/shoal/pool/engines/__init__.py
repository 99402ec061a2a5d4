"""Engines: what starts and restarts the processes of a pool."""
