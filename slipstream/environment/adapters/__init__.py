"""Adapters of tools and environments that were written for other libraries."""
