"""The protocol of inference engines, its counters, and the checks of requests.

An engine receives and returns token ids. It does not know prompts as text, rewards, groups or
training. One contract suite (`tests/inference/contract.py`) tests every implementation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import EngineError, RequestError
from slipstream.types import (
    EngineCapabilities,
    GenerateRequest,
    Generation,
    PolicyVersion,
    UpdateKind,
    WeightUpdate,
)

MIN_TEMPERATURE = 1e-5
"""With a lower temperature, logits / temperature may overflow in float32."""

MAX_TOP_K = 2**31 - 1


BATCH_LIMITS = (1, 4, 16, 64)
"""The largest batch size of each batch class but the last, which has no limit. Decode tokens and
seconds are counted per class."""


MOST_DEPTHS = 16
"""Number of draft depths that are counted separately; deeper drafts count as the last one."""


def batch_class(running: int) -> int:
    """Index of the batch class of a decode step with `running` requests."""
    return bisect_left(BATCH_LIMITS, running)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine since it was made, and a few current values.

    `version`, `running`, `waiting`, `kv_bytes`, `plan`, `server_share` and `server_difference` are
    current values; all other fields are counters. Seconds are those of the compute thread. A
    verification is one request in one decode step that verifies its drafts.
    """

    version: PolicyVersion = 0
    running: int = 0
    waiting: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    """Context tokens that a prefill computed."""
    shared_prompt_tokens: int = 0
    """Context tokens that were not computed, because another request of the same prefill had the
    same context."""
    reused_prompt_tokens: int = 0
    """Context tokens whose keys and values were copied from an earlier request."""
    generated_tokens: int = 0
    """Sampled tokens, including the first token of each response, which the prefill samples."""
    decode_steps: int = 0
    decode_tokens: int = 0
    """Tokens sampled in decode steps."""
    draft_tokens: int = 0
    """Draft tokens that were verified."""
    head_draft_tokens: int = 0
    """Draft tokens among them that a draft head proposed."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    sibling_tokens: int = 0
    """Accepted draft tokens of trees that were not the first child of their parent."""
    verifications: int = 0
    draft_steps: int = 0
    """Decode steps with drafts."""
    draft_depth: int = 0
    """Sum of the planned draft depths over all decode steps with drafts."""
    draft_seconds: float = 0.0
    """Part of `decode_seconds` in decode steps with drafts."""
    propose_seconds: float = 0.0
    """Part of `draft_seconds` that the draft proposer took."""
    recess_steps: int = 0
    """Decode steps without drafts because of speculation backoff, or because the draft head is
    untrained."""
    max_batch: int = 0
    """The largest number of requests in one decode step."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_bytes: int = 0
    """Bytes of keys and values now."""
    batch_tokens: tuple[int, ...] = (0,) * (len(BATCH_LIMITS) + 1)
    """`decode_tokens` by `batch_class`."""
    batch_seconds: tuple[float, ...] = (0.0,) * (len(BATCH_LIMITS) + 1)
    """`decode_seconds` by `batch_class`."""
    offered_depths: tuple[int, ...] = (0,) * MOST_DEPTHS
    """Entry d - 1 counts the verifications of drafts that were at least d deep."""
    accepted_depths: tuple[int, ...] = (0,) * MOST_DEPTHS
    """Entry d - 1 counts the verifications that accepted at least d draft tokens."""
    plan: str = ""
    """The draft plan of the last decode step, such as `8_4_32`."""
    plan_seconds: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """`decode_seconds` by `batch_class` and draft plan."""
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of weight updates, by part (engines with servers)."""
    server_checks: Mapping[str, int] = field(default_factory=dict)
    """Comparisons of servers with the trainer, by verdict (`servers.check.Verdict`)."""
    server_share: float | None = None
    """At the last comparison: share of the weights' change that a server showed, the smallest of
    all servers; None if nothing has changed."""
    server_difference: float | None = None
    """At the last comparison: root mean square difference of log-probs between a server and the
    trainer in nats, the largest of all servers."""

    def since(self, before: EngineStats) -> EngineStats:
        """Return the increase of the counters since `before`.

        Current values and `max_batch` stay as they are in `self`.
        """
        kept = (
            "version",
            "running",
            "waiting",
            "kv_bytes",
            "max_batch",
            "plan",
            "server_share",
            "server_difference",
        )
        changed: dict[str, Any] = {}
        for f in fields(self):
            now, then = getattr(self, f.name), getattr(before, f.name)
            if isinstance(now, tuple):
                changed[f.name] = tuple(a - b for a, b in zip(now, then, strict=True))
            elif isinstance(now, Mapping):
                new = {key: value - then.get(key, 0) for key, value in now.items()}
                changed[f.name] = {key: value for key, value in new.items() if value}
            elif f.name not in kept:
                changed[f.name] = now - then
        return replace(self, **changed)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, including the bonus token; 1 without verifications."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else 1.0

    @property
    def head_fraction(self) -> float:
        """Fraction of draft tokens that a draft head proposed; 0 without draft tokens."""
        return self.head_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def on_fraction(self) -> float:
        """Fraction of the decoding time in steps with drafts; 0 without decode steps."""
        return self.draft_seconds / self.decode_seconds if self.decode_seconds else 0.0


class InferenceEngine(Protocol):
    """Generates responses, and accepts weight updates while requests run.

    Calls such as `abort` and `update_weights` take effect between two steps, within about 0.1 s.
    Engines run steps in time slices of that length, so that the progress of requests does not
    depend on thread scheduling.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities that `config.engines` registers for this kind of engine."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one response and return it when it ends. Many calls can run concurrently.

        Raises RequestError for a request that can never be served. If the engine fails while it
        generates, the result has `StopReason.ERROR` and the reason. Cancelling the call aborts the
        request.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Stop requests (all if None) and return their partial generations.

        Their `generate` calls return the same generations, with `StopReason.ABORT`. Unknown ids
        are ignored.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding until `resume`. Requests are kept."""
        ...

    async def resume(self) -> None:
        """Continue decoding after `pause`."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Load new policy weights between two steps.

        Tokens sampled later have the new version in their spans. Raises EngineError, and keeps the
        old weights, if names, shapes or values do not fit, or if `capabilities.transports` lacks
        the update's transport. An engine with single-copy weights may be left with a mixture of
        old and new weights if the tensors do not fit; the error message says so.
        """
        ...

    async def update_drafter(self, update: WeightUpdate) -> None:
        """Load new draft-head weights. Raises EngineError if the engine has no draft head."""
        ...

    async def update_weights_from_checkpoint(
        self, path: Path, version: PolicyVersion | None = None
    ) -> None:
        """Load the weights of a checkpoint folder in Hugging Face format.

        It works like `update_weights` with `KVPolicy.KEEP`. Without `version`, the new version is
        the current version plus 1. Raises CheckpointError if the files cannot be read.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the counters so far."""
        ...

    def lend_to(self, lent: Callable[[bool], None]) -> None:
        """Register a callback for when decoding frees CPU cores of this process.

        The engine calls `lent(True)` on its compute thread when it starts to decode on one thread,
        and `lent(False)` before it uses all threads again. An engine without
        `capabilities.one_thread_tail` never calls it.
        """
        ...

    def close(self) -> None:
        """Stop all work and release the engine's resources. Later calls raise EngineError."""
        ...


def check_update(update: WeightUpdate, name: str, capabilities: EngineCapabilities) -> None:
    """Raise EngineError if `update` is no update of the whole policy, or has a transport that the
    engine `name` does not support."""
    if update.kind is not UpdateKind.FULL:
        raise EngineError(
            f"engine {name}: update_weights needs an update of kind {UpdateKind.FULL.value}, got "
            f"{update.kind.value}"
        )
    if update.transport not in capabilities.transports:
        known = ", ".join(sorted(capabilities.transports))
        raise EngineError(
            f"engine {name} supports weight updates with transport {known}, got "
            f"{update.transport.value}"
        )


def check_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Check a request. Raises RequestError, which names field and limit, if it can never be served.

    `max_model_len` limits the tokens of prompt, prior tokens and response together.
    """
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
        problem = f"top_k={p.top_k} must be at most {MAX_TOP_K} (0 switches it off)"
    elif not 0 < p.top_p <= 1:
        problem = f"top_p={p.top_p} must be in (0, 1] (1 switches it off)"
    elif not 0 <= p.min_p < 1:
        problem = f"min_p={p.min_p} must be in [0, 1) (0 switches it off)"
    elif not all(p.stop):
        problem = "stop contains an empty string, which would end every response at once; remove it"
    else:
        ids = (*request.prompt_ids, *request.prior_ids, *p.stop_token_ids)
        not_int = next((i for i in ids if type(i) is not int), None)
        if not_int is not None:
            problem = f"token id {not_int!r} is of type {type(not_int).__name__}, not an integer"
            raise RequestError(f"request {request.request_id!r}: {problem}")
        outside = next((i for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            problem = f"token id {outside} is outside the vocabulary of {vocab_size}"
    if problem:
        raise RequestError(f"request {request.request_id!r}: {problem}")
