"""Turns the configuration into objects, one module per part of a run.

Folders of lower rank do not read the configuration: they get values and objects.
"""
