"""Checks before a run: `slipstream doctor`, `--dry-run`, the memory estimate, the self test."""
