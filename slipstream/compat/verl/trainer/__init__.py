"""verl's package `verl.trainer`."""
