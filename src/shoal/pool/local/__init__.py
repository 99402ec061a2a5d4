"""The processes of a pool on this machine: who starts them, and who restarts them."""
