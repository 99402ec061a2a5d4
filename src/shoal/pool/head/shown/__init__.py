"""What the head shows of the pool."""
