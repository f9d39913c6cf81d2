"""Benchmarks that prove the claims of this project. They run in a checkout of the repository."""
