"""PyTorch's own CPU tests, without Shoal and with Shoal installed and not asked for.

`python -m tests.ecosystem.pytorch_suite` runs them both ways and lists every test that passes without
Shoal and does not pass with it. The tests come from Debian's source package; none of them is kept here.
"""
