"""slime's `slime.utils.http_utils`."""

from slipstream.rollout.agents.slime import post

__all__ = ["post"]
