"""The HTTP API and the dashboard: a process without rights of its own."""
