"""CO-TRAINING: the draft head learns from the hidden states of the policy."""
