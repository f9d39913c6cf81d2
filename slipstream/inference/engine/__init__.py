"""The embedded engine: continuous batching in PyTorch, exact and keyed.

    engine        add / step / abort / update_weights: the synchronous core
    settings      its limits
    request       one response under way
    scheduler     who runs, who waits, who is set aside
    prefill       contexts into keys and values: together, or a long one in pieces
    prefix_cache  keys and values of ended requests, for contexts that begin as theirs
    kv_cache      contiguous keys and values, one dense block of rows
    counters      what it counts
    memory        how many bytes they may take
    runner        weights and forward passes: prefill a group once, decode a batch, choose tokens
    graphs        decode steps that a GPU replays (`graph_shapes`: which; `recorder`: how)

It knows token ids only. `inference.embedded` puts it behind the asynchronous protocol.
"""

from slipstream.inference.engine.engine import Engine
from slipstream.inference.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings"]
