"""Drafting: what is proposed, by whom, and how much. Verification is the engine's."""
