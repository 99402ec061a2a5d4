"""Training over two devices beside PyTorch's own ways: `python -m bench.train`."""
