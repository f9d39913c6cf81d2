"""verl's `verl.tools`."""
