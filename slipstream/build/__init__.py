"""Turns the configuration into objects, one module per part of a run.

Only this folder, `run` and `preflight` read the whole configuration.
"""
