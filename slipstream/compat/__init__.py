"""Adapters for code that was written for other systems. Nothing in Slipstream imports them."""
