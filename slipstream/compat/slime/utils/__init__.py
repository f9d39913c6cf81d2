"""slime's `slime.utils`."""
