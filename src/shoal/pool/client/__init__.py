"""The client of a head: one request and its answer, joining, keeping a lease alive."""
