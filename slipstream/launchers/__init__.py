"""Commands that train, from their command line to the run. Shared by `cli` and the launchers."""
