"""Names of the package `rollouts`: replace `rollouts` by `slipstream.compat.rollouts`."""
