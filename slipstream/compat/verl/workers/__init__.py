"""verl's package `verl.workers`."""
