"""Measures idle devices, and keeps what was measured."""
