"""The life of a run: its folder, phases, checkpoints, console output, evaluation and export."""
