"""Options that only engines with servers read, and what has no effect with them.

Called by `load` (notices) and `validate` (rules). Options of a single kind of server are checked by
the functions that `engines` registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from slipstream.config.engines import engine_lacks
from slipstream.config.hardware import Hardware
from slipstream.config.schema import Config
from slipstream.config.tree import show

_ROLLOUT = "actor_rollout_ref.rollout"
_URLS = f"{_ROLLOUT}.server.urls"

TENSOR_PARALLEL = f"{_ROLLOUT}.tensor_model_parallel_size"

SERVER_OPTIONS: dict[str, str] = {
    TENSOR_PARALLEL: "each process of the run generates with all weights",
    f"{_ROLLOUT}.load_format": "the engine gets its weights from the trainer",
    f"{_ROLLOUT}.enable_chunked_prefill": f"{_ROLLOUT}.max_num_batched_tokens limits a prefill",
}
"""Option that only servers read -> why it has no effect with an engine without servers."""

_OF_THE_START = (
    *SERVER_OPTIONS,
    f"{_ROLLOUT}.enable_prefix_caching",
    f"{_ROLLOUT}.enforce_eager",
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ROLLOUT}.kv_cache_bytes",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.max_num_seqs",
)
"""Options that a run passes to the servers that it starts."""


def on_cpu(config: Config, hardware: Hardware) -> bool:
    """Return whether the run computes on the CPU."""
    return config.trainer.device == "cpu" or hardware.gpus == 0


def without_effect(config: Config, hardware: Hardware) -> Iterator[tuple[str, str]]:
    """Yield each option that has no effect because the engine has servers, and the reason.

    Yields nothing if the engine has none.
    """
    rollout = config.actor_rollout_ref.rollout
    if engine_lacks(config, lambda engine: engine.servers):
        return
    yield (
        f"{_ROLLOUT}.free_cache_engine",
        f"servers keep the memory of their KV cache; {_ROLLOUT}.gpu_memory_utilization limits it",
    )
    if rollout.server.urls:
        for key in _OF_THE_START:
            yield key, f"the servers of {_URLS} have settings of their own"
    elif on_cpu(config, hardware):
        yield (
            f"{_ROLLOUT}.gpu_memory_utilization",
            f"on a CPU, {_ROLLOUT}.kv_cache_bytes sets the memory of a server's KV cache",
        )
        if not rollout.enforce_eager:
            yield (
                f"{_ROLLOUT}.enforce_eager",
                "on a CPU, servers do not compile the model, because that takes longer than it "
                f"saves; {_ROLLOUT}.engine_kwargs.vllm.enforce_eager=false compiles it with vLLM",
            )


def kwargs_without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys of `engine_kwargs` that servers of this run do not get, and the reason."""
    rollout = config.actor_rollout_ref.rollout
    if engine_lacks(config, lambda engine: engine.servers):
        return  # `validate` has a rule for it.
    for name, value in rollout.engine_kwargs.items():
        if value and name != rollout.name:
            yield f"{_ROLLOUT}.engine_kwargs.{name}", f"the engine is {rollout.name}"
        elif value and rollout.server.urls:
            reason = f"the servers of {_URLS} have settings of their own"
            yield f"{_ROLLOUT}.engine_kwargs.{name}", reason


def server_rules(config: Config, hardware: Hardware) -> Iterator[str]:
    """Yield a message for each broken rule of an engine with servers."""
    rollout = config.actor_rollout_ref.rollout
    if engine_lacks(config, lambda engine: engine.servers):
        return
    for url in rollout.server.urls:
        if not _is_url(url):
            yield (
                f"{_URLS}={show(list(rollout.server.urls))}: {url!r} is not the URL of a server; "
                "set it to addresses such as http://host:8000"
            )
    size = rollout.tensor_model_parallel_size or 1
    if not rollout.server.urls and not on_cpu(config, hardware) and size > hardware.gpus:
        yield (
            f"{TENSOR_PARALLEL}={size}: this machine has {hardware.gpus} usable "
            f"GPU{'' if hardware.gpus == 1 else 's'} for a server; set {TENSOR_PARALLEL}="
            f"{hardware.gpus}"
        )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
