"""verl's module `verl.workers.config`: the class of a policy loss's settings."""

from slipstream.algorithms import PolicyLossConfig

__all__ = ["ActorConfig"]

ActorConfig = PolicyLossConfig
