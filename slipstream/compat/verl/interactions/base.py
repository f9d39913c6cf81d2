"""verl's `verl.interactions.base`."""

from slipstream.environment.adapters.verl_interactions import BaseInteraction

__all__ = ["BaseInteraction"]
