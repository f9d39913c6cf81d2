"""The training loops: `rl`, `sft`, `draft`, `evaluate`. Each reads from top to bottom.

They are pure: they work on the objects that `build` makes from the configuration. The command line
calls `run`, which calls them.
"""
