"""verl's package `verl.experimental.reward_loop`."""
