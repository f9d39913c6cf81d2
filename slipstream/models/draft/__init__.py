"""Draft heads (EAGLE-1 and EAGLE-3): their forward passes and their files."""
