"""Adapters of agent loops that were written for other libraries."""
