"""Worker groups: their devices and threads, and what the threads of a step share."""
