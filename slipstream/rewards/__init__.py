"""Reward functions, and the reward managers that call them on finished samples."""
