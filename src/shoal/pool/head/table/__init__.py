"""Parts of the lease table."""
