"""Thin surfaces for code that was written for other systems. Nothing of Slipstream imports them."""
