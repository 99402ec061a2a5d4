"""The simulator, its bounds, its figures and its plots."""
