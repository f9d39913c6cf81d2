"""Checks before a run: `slipstream doctor`, `--dry-run`, the memory estimate and the self-test."""
