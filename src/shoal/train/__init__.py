"""Worker groups: one Python program trains one model over many devices."""
