"""verl's `verl.interactions` (up to 0.7.1)."""
