"""slime's `slime.rollout.sglang_rollout`."""

from slipstream.rollout.agents.slime import GenerateState

__all__ = ["GenerateState"]
