"""The seam between rollouts and whatever generates tokens.

An engine takes token ids and returns token ids. It knows nothing about prompts as text, rewards,
groups as a statistical notion, or training. One contract suite (`tests/inference/contract.py`) runs
over every implementation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import RequestError
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    PolicyVersion,
    WeightUpdate,
)

MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature may overflow in float32."""

MAX_TOP_K = 2**31 - 1


BATCH_LIMITS = (1, 4, 16, 64)
"""Upper ends of the classes of batch sizes that speeds are counted in; the last has none."""


MOST_DEPTHS = 16
"""Depths of drafts that are counted apart."""


def batch_class(running: int) -> int:
    """Index of the class that a batch of `running` requests is in."""
    return bisect_left(BATCH_LIMITS, running)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made; seconds are of the compute thread.

    Of the tokens of contexts, `prompt_tokens` were computed, `shared_prompt_tokens` belonged to a
    context that another request brought at the same time, and `reused_prompt_tokens` were taken
    over from other requests.
    `decode_tokens` were sampled in decode steps, `generated_tokens` counts the first token of each
    response too. In `draft_steps`, which took `draft_seconds` of the `decode_seconds`, chains of
    `draft_depth` (their sum) were planned; of `recess_steps` it was clear from the beginning of
    their requests that nothing would be drafted, for drafts had gained nothing. Of the
    `draft_tokens` that were verified in `verifications`, one per request and step,
    `accepted_tokens` were right, among them `sibling_tokens` that were not the first drafts after
    the tokens before them, but others of a tree. Of the verifications `offered_depths` counts those
    whose drafts were 1, 2, ... deep, and `accepted_depths` those of which as many were right; the
    last counts all that is deeper, too. `propose_seconds` is what who drafts took of the
    `draft_seconds`. `batch_tokens` and `batch_seconds` are those of decode steps by class of batch
    size (`batch_class`), and `plan_seconds` has the seconds by class and plan (`8_4_32`).
    `max_batch` is the largest number of requests in one decode step. `kv_bytes`, what keys and
    values take now, `plan`, that of the last decode step, and `running` and `waiting` are no
    counters.
    """

    version: PolicyVersion = 0
    running: int = 0
    waiting: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    head_draft_tokens: int = 0
    accepted_tokens: int = 0
    sibling_tokens: int = 0
    verifications: int = 0
    draft_steps: int = 0
    draft_depth: int = 0
    draft_seconds: float = 0.0
    propose_seconds: float = 0.0
    recess_steps: int = 0
    max_batch: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_bytes: int = 0
    batch_tokens: tuple[int, ...] = (0,) * (len(BATCH_LIMITS) + 1)
    batch_seconds: tuple[float, ...] = (0.0,) * (len(BATCH_LIMITS) + 1)
    offered_depths: tuple[int, ...] = (0,) * MOST_DEPTHS
    accepted_depths: tuple[int, ...] = (0,) * MOST_DEPTHS
    plan: str = ""
    plan_seconds: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after `before`; what is no counter, and `max_batch`, as it is here."""
        kept = ("version", "running", "waiting", "kv_bytes", "max_batch", "plan")
        changed: dict[str, Any] = {}
        for f in fields(self):
            now, then = getattr(self, f.name), getattr(before, f.name)
            if isinstance(now, tuple):
                changed[f.name] = tuple(a - b for a, b in zip(now, then, strict=True))
            elif isinstance(now, Mapping):
                new = {key: value - then.get(key, 0.0) for key, value in now.items()}
                changed[f.name] = {key: value for key, value in new.items() if value}
            elif f.name not in kept:
                changed[f.name] = now - then
        return replace(self, **changed)

    @property
    def accept_length(self) -> float:
        """Tokens per verification, the bonus token included; 1 where nothing was verified."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else 1.0

    @property
    def head_fraction(self) -> float:
        """Share of the drafted tokens that a draft model made; 0 where nothing was drafted."""
        return self.head_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def on_fraction(self) -> float:
        """Share of decoding time in steps that draft; 0 where nothing was decoded."""
        return self.draft_seconds / self.decode_seconds if self.decode_seconds else 0.0


class InferenceEngine(Protocol):
    """Generates responses; takes weight updates while requests run.

    What it is asked while requests run happens between two steps, within a tenth of a second:
    engines let steps run in slices of that time, for how far requests get should not depend on when
    a thread was scheduled.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """What engines of this kind can do, as registered (`config.engines`)."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one response; returns when it ends. Many calls run at once.

        Raises RequestError for a request that can never be served. A failure of the engine under
        way comes back as a Generation with `StopReason.ERROR` and its reason. Cancelling the call
        aborts the request.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Stop requests (all when None) and return their partial generations.

        Their `generate` calls return the same, with `StopReason.ABORT`. Unknown ids are
        ignored.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding; requests stay."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take new policy weights between two steps.

        Names, shapes and values are checked first: on EngineError the old weights stay. Tokens
        sampled from then on carry the new version in their spans. EngineError also if
        `capabilities.transports` lacks the update's transport.
        """
        ...

    async def update_drafter(self, update: WeightUpdate) -> None:
        """Take new draft-head weights. EngineError where the engine has no drafter."""
        ...

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        """Take the weights of a Hugging Face folder, as `update_weights` with `KVPolicy.KEEP`.

        Without `version` they become the one after the engine's present version.
        Raises CheckpointError when its files cannot be read.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters so far."""
        ...

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Say when cores of this process become free.

        From now on the engine calls `lent(True)` on its compute thread when it begins to decode on
        one thread, and `lent(False)` before it uses all threads again. An engine without
        `capabilities.one_thread_tail` never calls it.
        """
        ...

    def close(self) -> None:
        """Stop all work and release what the engine holds. Later calls raise EngineError."""
        ...


def check_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request that can never be served. Raises RequestError naming field and limit."""
    p = request.params
    length = len(request.prompt_ids) + len(request.prior_ids)
    problem = None
    if not request.prompt_ids:
        problem = "the prompt is empty; it needs at least one token"
    elif p.max_tokens < 1:
        problem = f"max_tokens={p.max_tokens} must be at least 1"
    elif length + p.max_tokens > max_model_len:
        problem = (
            f"{length} tokens of context plus max_tokens={p.max_tokens} exceed the engine's "
            f"max_model_len={max_model_len}; shorten the prompt, lower max_tokens or raise "
            "actor_rollout_ref.rollout.max_model_len"
        )
    elif not (p.temperature == 0 or MIN_TEMPERATURE <= p.temperature < math.inf):
        problem = (
            f"temperature={p.temperature} must be 0 (greedy) or a number of at least "
            f"{MIN_TEMPERATURE:g}"
        )
    elif p.top_k > MAX_TOP_K:
        problem = f"top_k={p.top_k} is more than {MAX_TOP_K} (0 switches it off)"
    elif not 0 < p.top_p <= 1:
        problem = f"top_p={p.top_p} must be in (0, 1] (1 switches it off)"
    elif not 0 <= p.min_p < 1:
        problem = f"min_p={p.min_p} must be in [0, 1) (0 switches it off)"
    elif not all(p.stop):
        problem = "an empty stop string would end every response before it begins; leave it out"
    else:
        ids = (*request.prompt_ids, *request.prior_ids, *p.stop_token_ids)
        strange = next((i for i in ids if type(i) is not int), None)
        if strange is not None:
            problem = f"token id {strange!r} is of type {type(strange).__name__}, not an integer"
            raise RequestError(f"request {request.request_id!r}: {problem}")
        outside = next((i for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            problem = f"token id {outside} is outside the vocabulary of {vocab_size}"
    if problem:
        raise RequestError(f"request {request.request_id!r}: {problem}")
