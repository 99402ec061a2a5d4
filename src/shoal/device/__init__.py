"""The torch device `shoal`: registration, leases, and the `torch.shoal` module."""
