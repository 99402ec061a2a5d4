"""The device's speed beside local torch: `python -m bench.device`."""
