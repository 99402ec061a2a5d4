"""Training data: files and datasets, read here or at the nodes, in batches."""
