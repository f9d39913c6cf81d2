"""Runs programs written by a model, isolated on this machine or through a service.

Knows programs and their limits, not tests or scores.
"""
