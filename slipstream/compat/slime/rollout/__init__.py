"""slime's `slime.rollout`."""
