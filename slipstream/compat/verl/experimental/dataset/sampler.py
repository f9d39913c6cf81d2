"""verl's module `verl.experimental.dataset.sampler`."""

from slipstream.data.samplers import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
