"""The embedded engine: continuous batching in PyTorch, exact and keyed.

    engine     add / step / abort / update_weights: the synchronous core
    request    one response under way
    scheduler  who runs, who waits, who is set aside
    kv_cache   contiguous keys and values, one dense block of rows
    runner     weights and forward passes: prefill a group once, decode a batch, choose tokens

It knows token ids only. `inference.embedded` puts it behind the asynchronous protocol.
"""

from slipstream.inference.engine.engine import Engine, EngineSettings

__all__ = ["Engine", "EngineSettings"]
