"""What `shoal up` and `shoal doctor` do with a pool on another engine than this machine."""
