"""Benchmarks that back the claims of this project; run them from a checkout."""
