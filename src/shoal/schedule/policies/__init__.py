"""One file per policy. A file that is added here is found by itself."""
