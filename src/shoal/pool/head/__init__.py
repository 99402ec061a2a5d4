"""The head: who has which devices. Pure tables, and the process around them."""
