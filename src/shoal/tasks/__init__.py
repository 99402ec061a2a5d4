"""Tasks: what they ask for, what becomes of them, who may have devices, and why a request waits."""
