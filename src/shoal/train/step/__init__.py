"""One training step over all groups, and what follows when one fails."""
