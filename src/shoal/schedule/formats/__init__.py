"""Traces and throughput tables in files."""
