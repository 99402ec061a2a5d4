"""A node: its agent, its device servers, and what they do for clients."""
