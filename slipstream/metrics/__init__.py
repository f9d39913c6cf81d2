"""Metrics of a run: names and units, statistics, loggers, progress display, and the plot.

Importing this package is cheap: torch, matplotlib and tensorboard are imported only when used.
"""
