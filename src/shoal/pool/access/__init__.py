"""Join codes and certificates: how a client or a node becomes part of a pool."""
