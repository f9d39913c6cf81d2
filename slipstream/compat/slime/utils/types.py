"""slime's `slime.utils.types`."""

from slipstream.rollout.agents.slime_types import Sample

__all__ = ["Sample"]
