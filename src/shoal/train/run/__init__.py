"""A whole training: fit, checkpoints, progress and report."""
