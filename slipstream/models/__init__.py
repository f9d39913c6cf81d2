"""The policy model: one decoder for engine and trainer, its heads, and its file formats.

`decoder` maps token ids to hidden states. It knows nothing about sampling, losses or schedules.
`draft` holds the draft heads.
"""

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, PackedDecoder
from slipstream.models.hf_io import load_checkpoint, save_checkpoint

__all__ = ["Decoder", "ModelConfig", "PackedDecoder", "load_checkpoint", "save_checkpoint"]
