"""`slipstream bench speculation`: how much speculative decoding speeds up a trained policy."""
