"""Memory beyond the device, beside enough memory and other pagers: `python -m bench.memory`."""
