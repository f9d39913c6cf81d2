"""What the lossless check generates: workloads of requests of every kind.

Knows nothing of proposers. Called by `lossless`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from slipstream.bench.lossless.targets import Target
from slipstream.errors import check_at_least_one
from slipstream.types import GenerateRequest, KVPolicy, NoiseKey, SamplingParams

PROPOSERS = ("eagle head", "eagle3 head", "seeded history", "union", "lying oracle")
"""The second is the policy's head where that is of EAGLE-3, else one that was never trained. The
history is seeded with the plain responses, a token in `HISTORY_LIES` wrong, beside what it
sees itself; the union is of both; the oracle is no drafter (see `drafters`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessWorkload:
    """Requests that are generated together, at most `limit` at a time."""

    name: str
    requests: Sequence[GenerateRequest]
    limit: int
    unrest: float = 1.0
    """How often requests are preempted or aborted, against the usual: less where each costs much to
    compute again."""
    updates: KVPolicy | None = None
    """Where weights are updated twice under way: what becomes of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessBench:
    """One check: at least `tokens` tokens of `target` are compared with each of the proposers.

    `batch` is that of the common workloads. Raises ConfigError for counts below 1.
    """

    target: Target
    tokens: int
    dtype: torch.dtype = torch.float32
    batch: int = 64
    mean_tokens: int = 64
    long_context: int = 1010
    proposers: Sequence[str] = PROPOSERS

    def __post_init__(self) -> None:
        check_at_least_one(self, "tokens", "batch", "mean_tokens", "long_context")

    @property
    def long_contexts_fit(self) -> bool:
        """Whether the policy knows the positions of the wave of long contexts."""
        needed = self.long_context + 2 * self.mean_tokens
        return needed <= self.target.decoder.config.context_limit.tokens


def workloads(bench: LosslessBench) -> Iterator[LosslessWorkload]:
    """Waves without end: the rare kinds come first, then batches of several sizes in turn."""
    rng = Random(0)
    make = _Requests(bench, rng)
    common: list[dict[str, Any]] = [{}, {}, {"temperature": 0.7}, {"temperature": 0.0}]
    cut: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 20, "temperature": 1.2},
        {"min_p": 0.05},
        {"top_p": 0.8, "top_k": 50, "min_p": 0.02},
        {},
        {"temperature": 0.0},
    ]
    few = max(4, bench.batch // 8)
    yield LosslessWorkload(name="one at a time", requests=make(2, common), limit=1)
    yield LosslessWorkload(name="cut laws", requests=make(2 * few, cut), limit=few)
    for policy in KVPolicy:
        name = f"weight updates, {policy.value}"
        # Plain runs of these are of one or two requests each, so there are few of them.
        yield LosslessWorkload(name=name, requests=make(4, common), limit=4, updates=policy)
    if bench.long_contexts_fit:
        requests = make(4, [*common[:3], {"top_k": 20}], length=bench.long_context)
        yield LosslessWorkload(name="long contexts", requests=requests, limit=4, unrest=0.2)
    while True:
        for limit in (bench.batch, max(1, bench.batch // 2), max(1, bench.batch // 9)):
            requests = make(min(bench.batch, 3 * limit), common)
            yield LosslessWorkload(name=f"batch of {limit}", requests=requests, limit=limit)


def enough(bench: LosslessBench) -> Iterator[LosslessWorkload]:
    """Every rare kind once and as many common workloads as `bench.tokens` takes."""
    count, rare = 0, len(KVPolicy) + 2 + bench.long_contexts_fit
    for index, wave in enumerate(workloads(bench)):
        yield wave
        # Responses of the updates have other tokens, but as many.
        count += sum(r.params.max_tokens for r in wave.requests if r.params.ignore_eos)
        if index >= rare and count >= bench.tokens:
            return


class _Requests:
    """Makes requests of distinct ids whose prompts are pieces of the policy's own texts."""

    def __init__(self, bench: LosslessBench, rng: Random) -> None:
        self._bench = bench
        self._rng = rng
        self._count = 0

    def __call__(
        self, count: int, kinds: Sequence[Mapping[str, Any]], *, length: int | None = None
    ) -> list[GenerateRequest]:
        return [self._one(kinds[i % len(kinds)], length) for i in range(count)]

    def _one(self, kind: Mapping[str, Any], length: int | None) -> GenerateRequest:
        rng, mean = self._rng, self._bench.mean_tokens
        texts = self._bench.target.texts
        prompt: list[int] = []
        wanted = length or rng.randrange(2, len(texts[0]) // 2)
        while len(prompt) < wanted:
            prompt += rng.choice(texts)
        # One in eight may end early, inside a run of accepted drafts.
        early = self._count % 8 == 7
        stops = tuple(rng.sample(texts[0], 2)) if early else ()
        self._count += 1
        return GenerateRequest(
            request_id=f"r{self._count}",
            prompt_ids=tuple(prompt[:wanted]),
            params=SamplingParams(
                max_tokens=rng.randrange(mean // 2, mean + mean // 2),
                ignore_eos=not early,
                stop_token_ids=stops,
                **kind,
            ),
            key=NoiseKey(seed=0, uid=f"r{self._count}"),
        )
