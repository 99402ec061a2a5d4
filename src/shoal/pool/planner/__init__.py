"""The planner: decides which task runs where, in a process of its own that may die at any moment."""
