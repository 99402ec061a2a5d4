"""The sandbox in which a node runs other people's programs."""
