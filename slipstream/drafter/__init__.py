"""Training of draft heads on the policy's hidden states, before RL and during it (co-training)."""
