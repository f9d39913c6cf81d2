"""Tools that a policy can call, and the environment that executes the calls."""
