"""Every speed claim of the project is a script here. See `python -m bench.device --help`."""
