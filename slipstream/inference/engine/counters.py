"""The counters of the embedded engine.

`Counters` has the counters of `EngineStats` under the same names. The compute thread increases
them; any thread may call `stats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from slipstream.inference.protocol import BATCH_LIMITS, MOST_DEPTHS, EngineStats, batch_class
from slipstream.inference.speculation.plan import OFF, DraftPlan


def _classes() -> list[int]:
    return [0] * (len(BATCH_LIMITS) + 1)


def _depths() -> list[int]:
    return [0] * MOST_DEPTHS


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since the engine was made. `EngineStats` documents the fields.

    There are two differences. Entry d - 1 of `offered_depths` and `accepted_depths` counts depth d
    exactly; only the last entry includes greater depths. The keys of `plan_seconds` have the plan
    instead of its name.
    """

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
    batch_tokens: list[int] = field(default_factory=_classes)
    batch_seconds: list[float] = field(default_factory=lambda: [0.0] * (len(BATCH_LIMITS) + 1))
    offered_depths: list[int] = field(default_factory=_depths)
    accepted_depths: list[int] = field(default_factory=_depths)
    plan: DraftPlan = OFF
    """The plan of the last decode step."""
    plan_seconds: dict[tuple[int, DraftPlan], float] = field(default_factory=dict)

    def decoded(self, requests: int, tokens: int, seconds: float) -> None:
        """Count a decode step of `requests` requests that sampled `tokens` tokens."""
        self.decode_steps += 1
        self.decode_tokens += tokens
        self.decode_seconds += seconds
        self.max_batch = max(self.max_batch, requests)
        size = batch_class(requests)
        self.batch_tokens[size] += tokens
        self.batch_seconds[size] += seconds

    def planned(self, plan: DraftPlan, requests: int, seconds: float) -> None:
        """Count the time of a decode step for its plan, in an engine that can draft."""
        self.plan = plan
        key = batch_class(requests), plan
        self.plan_seconds[key] = self.plan_seconds.get(key, 0.0) + seconds

    def drafted(
        self,
        plan: DraftPlan,
        drafts: Sequence[int],
        *,
        by_head: int,
        seconds: float,
        proposing: float,
    ) -> None:
        """Count a decode step with drafts.

        `drafts` has the number of verified draft tokens of each request; a draft head proposed
        `by_head` of them. The step took `seconds`; the proposer took `proposing` of these.
        """
        self.draft_tokens += sum(drafts)
        self.head_draft_tokens += by_head
        self.verifications += sum(n > 0 for n in drafts)
        self.draft_steps += 1
        self.draft_depth += plan.steps
        self.draft_seconds += seconds
        self.propose_seconds += proposing

    def verified(self, offered: int, accepted: int) -> None:
        """Count the verification of one request: drafts of depth `offered`, of which `accepted` in
        succession were accepted."""
        self.offered_depths[min(offered, MOST_DEPTHS) - 1] += 1
        if accepted:
            self.accepted_depths[min(accepted, MOST_DEPTHS) - 1] += 1

    def stats(self, *, version: int, running: int, waiting: int, kv_bytes: int) -> EngineStats:
        """All counters, together with the given current values."""
        return EngineStats(
            version=version,
            running=running,
            waiting=waiting,
            finished=self.finished,
            aborted=self.aborted,
            preempted=self.preempted,
            prompt_tokens=self.prompt_tokens,
            shared_prompt_tokens=self.shared_prompt_tokens,
            reused_prompt_tokens=self.reused_prompt_tokens,
            generated_tokens=self.generated_tokens,
            decode_steps=self.decode_steps,
            decode_tokens=self.decode_tokens,
            draft_tokens=self.draft_tokens,
            head_draft_tokens=self.head_draft_tokens,
            accepted_tokens=self.accepted_tokens,
            sibling_tokens=self.sibling_tokens,
            verifications=self.verifications,
            draft_steps=self.draft_steps,
            draft_depth=self.draft_depth,
            draft_seconds=self.draft_seconds,
            propose_seconds=self.propose_seconds,
            recess_steps=self.recess_steps,
            max_batch=self.max_batch,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            kv_bytes=kv_bytes,
            batch_tokens=tuple(self.batch_tokens),
            batch_seconds=tuple(self.batch_seconds),
            offered_depths=_at_least(self.offered_depths),
            accepted_depths=_at_least(self.accepted_depths),
            plan=_name(self.plan),
            plan_seconds={
                # Copied first, because another thread may call this during a step.
                (size, _name(plan)): seconds
                for (size, plan), seconds in dict(self.plan_seconds).items()
            },
        )


def _at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """Turn counts of exact depths into counts of at least that depth."""
    return tuple(accumulate(counts[::-1]))[::-1]


def _name(plan: DraftPlan) -> str:
    return "off" if plan == OFF else str(plan)
