"""Inference engines behind one protocol: `embedded` (our own), `hf` (transformers) and `fake`."""

from slipstream.config.engines import register_engine
from slipstream.inference.protocol import EngineStats, InferenceEngine
from slipstream.inference.sync import sync_weights_to_engines

__all__ = ["EngineStats", "InferenceEngine", "register_engine", "sync_weights_to_engines"]
