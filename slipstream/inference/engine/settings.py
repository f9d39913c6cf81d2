"""The settings of an embedded engine, with their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.errors import ConfigError, check_at_least_one
from slipstream.models.numerics import KEY_CHUNK, ROW_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of one engine. Raises ConfigError for an unsupported dtype, for a limit below 1,
    and for `max_prefill_tokens` below `ROW_MULTIPLE`."""

    max_model_len: int
    """Maximum tokens of context and response together."""
    dtype: torch.dtype
    """The dtype of weights and computation."""
    max_num_seqs: int = 256
    """Maximum number of running requests; further requests wait."""
    kv_budget_bytes: int = 4 << 30
    """Maximum bytes of cached keys and values. Requests that do not fit wait or are preempted. Keys
    and values that are saved at a weight update, and those of a chunked prefill, do not count."""
    max_prefill_tokens: int = 8192
    """Maximum tokens of one prefill, including padding. A longer context is prefilled in chunks,
    with decode steps between them."""
    prefix_caching: bool = False
    """Whether keys and values of ended requests are cached in the free part of the budget, until
    the weights change. Conversations of several turns gain; other requests pay for a copy without
    gain."""
    stagger_samples: bool = False
    """Whether the samples of a prompt run one after the other, as long as requests for other
    prompts can run at the same time. History drafts can then use the finished samples."""
    enforce_eager: bool = False
    """Whether a GPU runs decode steps without CUDA graphs."""
    free_cache_engine: bool = True
    """Whether an engine without requests releases the memory of keys and values. Allocating it
    again takes time."""
    one_thread_below: int = 0
    """On a CPU, decode on one thread if no request waits and at most this many run. This frees the
    other cores, and a small model is hardly slower."""
    one_copy: bool = False
    """Whether the only copy of the weights is in `dtype`, and updates overwrite it
    (`models.single_copy_weights`). It needs matrix products by torch, not by the compiled
    kernels."""

    def __post_init__(self) -> None:
        if self.dtype not in KEY_CHUNK:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEY_CHUNK)
            raise ConfigError(f"engine dtype {self.dtype} is not supported; choose one of {known}")
        limits = ("max_model_len", "max_num_seqs", "kv_budget_bytes", "max_prefill_tokens")
        check_at_least_one(self, *limits, where="engine: ")
        if self.max_prefill_tokens < ROW_MULTIPLE:
            raise ConfigError(
                f"engine: max_prefill_tokens={self.max_prefill_tokens} must be at least "
                f"{ROW_MULTIPLE}, because tokens are computed in multiples of {ROW_MULTIPLE}"
            )
