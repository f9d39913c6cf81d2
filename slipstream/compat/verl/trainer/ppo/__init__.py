"""verl's package `verl.trainer.ppo`."""
