"""`rollouts.training`."""
