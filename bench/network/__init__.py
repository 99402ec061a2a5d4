"""The device over TCP beside shared memory and plain sockets: `python -m bench.network`."""
