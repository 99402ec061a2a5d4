"""One file per policy. Shoal finds a new file here by itself."""
