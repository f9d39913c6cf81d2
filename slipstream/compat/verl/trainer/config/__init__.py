"""verl's module `verl.trainer.config`: the class of an estimator's settings."""

from slipstream.algorithms import AdvantageConfig

__all__ = ["AlgoConfig"]

AlgoConfig = AdvantageConfig
