"""verl's module `verl.utils.dataset.dynamicgen_dataset`."""

from slipstream.data.rlhf_dataset import AbstractDataGenerator, DynamicGenDataset

__all__ = ["AbstractDataGenerator", "DynamicGenDataset"]
