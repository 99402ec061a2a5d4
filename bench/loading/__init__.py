"""How long a device waits for data from the disk: `python -m bench.loading`."""
