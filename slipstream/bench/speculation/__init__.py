"""`slipstream bench speculation`: the speedup of a trained policy by speculative decoding."""
