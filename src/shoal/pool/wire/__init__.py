"""Messages of the control plane, and how they go over a connection."""
