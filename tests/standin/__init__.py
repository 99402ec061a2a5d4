"""The stand-in: an accelerator for tests on machines that have none. See README.md."""
