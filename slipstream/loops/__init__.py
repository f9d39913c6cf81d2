"""The loops, to be read top to bottom: `sft`, `rl`, `evaluate`. `build` wires the objects that they
run on, `run` is what the command line calls."""
