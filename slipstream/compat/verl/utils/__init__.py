"""verl's package `verl.utils`."""

from slipstream.compat.verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]
