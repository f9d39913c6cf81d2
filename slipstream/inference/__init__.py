"""INFERENCE: engines behind one protocol: `embedded` (ours), `hf` (transformers), `fake`."""

from slipstream.inference.protocol import EngineStats, InferenceEngine
from slipstream.inference.sync import sync_weights_to_engines

__all__ = ["EngineStats", "InferenceEngine", "sync_weights_to_engines"]
