"""Speculative decoding: draft proposers, draft plans, and selectors that choose a plan."""
