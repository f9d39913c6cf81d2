"""The embedded engine: continuous batching in PyTorch, with exact mode and keyed noise.

    engine          the synchronous core: add, step, abort, update_weights
    settings        the limits of an engine
    request         the state of one request
    scheduler       which requests run, wait or are preempted
    prefill         prefill of new contexts, and chunked prefill of long ones
    prefix_cache    keys and values of ended requests, reused for contexts with the same prefix
    kv_rows         what the engine needs of a KV cache
    kv_blocks       the KV cache of the CPU kernels: blocks of slots for each request
    kv_cache        the KV cache of torch's operations: one rectangle
    kv_store        chooses between the two
    memory          the byte budget of keys and values
    counters        the counters of `EngineStats`
    verification    the input tensors of a decode step with drafts
    batch_sampling  the sampling settings of a batch, as tensors
    runner          weights and forward passes
    graphs          CUDA graphs of decode steps (`graph_shapes`: which shapes; `recorder`: how)
    choice_graphs   CUDA graphs of token sampling

The engine only knows token ids. `inference.embedded` wraps it in the asynchronous protocol.
"""

from slipstream.inference.engine.engine import Engine
from slipstream.inference.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings"]
