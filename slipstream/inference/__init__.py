"""INFERENCE: engines behind one protocol: `embedded` (ours), `hf` (transformers), `fake`."""

from slipstream.inference.protocol import EngineStats, InferenceEngine

__all__ = ["EngineStats", "InferenceEngine"]
