"""verl's module `verl.utils.dataset.rl_dataset`."""

from slipstream.data.rlhf_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
