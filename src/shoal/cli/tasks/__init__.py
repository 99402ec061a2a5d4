"""Verbs about tasks: submit, run, queue, logs and the runner."""
