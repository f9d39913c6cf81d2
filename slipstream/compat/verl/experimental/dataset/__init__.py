"""verl's package `verl.experimental.dataset`."""
