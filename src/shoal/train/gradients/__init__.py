"""Gradients between groups: buckets, their sums, and loss scaling."""
