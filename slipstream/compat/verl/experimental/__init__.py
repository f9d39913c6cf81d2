"""verl's package `verl.experimental`."""
