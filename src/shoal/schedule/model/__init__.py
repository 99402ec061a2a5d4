"""What the scheduler knows: devices, tasks, their speeds, and how these are measured."""
