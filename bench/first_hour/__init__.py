"""What a person with one GPU types first. See README.md."""
