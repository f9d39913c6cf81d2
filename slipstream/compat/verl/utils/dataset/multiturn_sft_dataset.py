"""verl's module `verl.utils.dataset.multiturn_sft_dataset`."""

from slipstream.data.sft_dataset import MultiTurnSFTDataset

__all__ = ["MultiTurnSFTDataset"]
