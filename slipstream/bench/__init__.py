"""What `slipstream bench` runs: rollouts, training steps and the start of the command line, timed.

Every result is a `record.ResultRow` that carries what is needed to read it later. Other systems
that need an environment of their own are measured by scripts in the repository's `bench/`.
"""
