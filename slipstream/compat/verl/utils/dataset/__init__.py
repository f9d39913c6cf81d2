"""verl's package `verl.utils.dataset`."""

from slipstream.data.rlhf_dataset import RLHFDataset
from slipstream.data.sft_dataset import MultiTurnSFTDataset

__all__ = ["MultiTurnSFTDataset", "RLHFDataset"]
