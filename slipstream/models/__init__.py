"""The policy model: one decoder for the engine and for training, its heads, and its file format.

`decoder` knows nothing about sampling, losses or schedules; it maps token ids to hidden states.
"""

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, PackedDecoder
from slipstream.models.hf_io import load_checkpoint, save_checkpoint

__all__ = ["Decoder", "ModelConfig", "PackedDecoder", "load_checkpoint", "save_checkpoint"]
