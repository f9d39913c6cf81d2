"""Benchmarks that users run on their own machine, as `slipstream bench NAME`.

Every result is a `record.ResultRow`, which also holds machine, versions and settings. Benchmarks
that prove the project's own claims are in the repository's folder `bench/`. So are the scripts that
run vLLM, llama.cpp and TRL, which need virtual environments of their own.
"""
