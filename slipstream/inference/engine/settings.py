"""Limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.errors import ConfigError, check_at_least_one
from slipstream.models.numerics import KEY_CHUNK, ROW_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of one engine.

    `max_model_len` bounds context plus response; `kv_budget_bytes` bounds cached keys and values
    (requests beyond it wait or are preempted); `max_prefill_tokens` bounds one prefill, padding
    included: a longer context is prefilled in pieces, with decode steps in between. Keys and values
    set aside after a weight update, and those of a context in pieces, are not part of the budget.
    With `prefix_caching` those of ended requests stay in what the budget leaves free, for contexts
    that begin as theirs did, until the weights change: for conversations of several turns; others
    only pay for the copy. With `stagger_samples` samples of one prompt run one after the other as
    long as there are others to run beside them, so that one can be drafted for from what another
    has written. On a GPU decode steps are recorded and replayed, unless `enforce_eager`. The memory
    of keys and values is given back when no request is left, unless `free_cache_engine` is off: to
    get it again takes time. On a CPU the last `one_thread_below` requests or fewer decode on one
    thread: a small model is hardly slower so, and the other cores are free. With `one_copy` weights
    are kept in `dtype` alone and overwritten as they arrive (`models.single_copy_weights`), if
    torch multiplies. Raises ConfigError for limits that allow nothing.
    """

    max_model_len: int
    dtype: torch.dtype
    max_num_seqs: int = 256
    kv_budget_bytes: int = 4 << 30
    max_prefill_tokens: int = 8192
    prefix_caching: bool = False
    stagger_samples: bool = False
    enforce_eager: bool = False
    free_cache_engine: bool = True
    one_thread_below: int = 0
    one_copy: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in KEY_CHUNK:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEY_CHUNK)
            raise ConfigError(f"engine dtype {self.dtype} is not supported; choose one of {known}")
        limits = ("max_model_len", "max_num_seqs", "kv_budget_bytes", "max_prefill_tokens")
        check_at_least_one(self, *limits, where="engine: ")
        if self.max_prefill_tokens < ROW_MULTIPLE:
            raise ConfigError(
                f"engine: max_prefill_tokens={self.max_prefill_tokens} must be at least "
                f"{ROW_MULTIPLE}, for tokens are computed in fours"
            )
