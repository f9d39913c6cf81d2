"""Workloads of the lossless check: batches of requests of every kind. Used by `check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from slipstream.bench.lossless.targets import Target
from slipstream.errors import check_at_least_one
from slipstream.types import GenerateRequest, KVPolicy, NoiseKey, SamplingParams

RENEWED, COPY = "draft vocabulary", "quantized copy"

PROPOSERS = (
    *("eagle head", "eagle3 head", RENEWED, COPY, "seeded history", "union"),
    "lying oracle",
)
"""Draft proposers that are checked. `draft vocabulary` is an EAGLE head that drafts half of the
tokens, which are renewed during the run. `quantized copy` is a copy of the policy with 4-bit
weights. `eagle3 head` is the policy's head if it is an EAGLE-3 head,
else an untrained one. `seeded history` starts with the plain responses, of whose tokens a share of
`check.HISTORY_LIES` is wrong. `union` combines head and history. `lying oracle` knows the plain
responses (see `drafters.LyingOracle`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessWorkload:
    """Requests that are generated together, at most `limit` at the same time."""

    name: str
    requests: Sequence[GenerateRequest]
    limit: int
    interruptions: float = 1.0
    """A factor on the rates of preemptions and aborts. It is small for requests that are expensive
    to compute again."""
    updates: KVPolicy | None = None
    """Not None: weights are updated twice during the workload, with this policy for the KV
    cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessBench:
    """One check: at least `tokens` tokens of `target` are compared for each proposer.

    `batch` is the batch size of the common workloads. Raises ConfigError for counts below 1.
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
        """Whether the policy has enough positions for the workload with long contexts."""
        needed = self.long_context + 2 * self.mean_tokens
        return needed <= self.target.decoder.config.context_limit.tokens


def workloads(bench: LosslessBench) -> Iterator[LosslessWorkload]:
    """Endless workloads: first each rare kind once, then common ones of alternating batch sizes."""
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
        # Few requests, because their runs without drafts have batches of one or two requests.
        yield LosslessWorkload(name=name, requests=make(4, common), limit=4, updates=policy)
    if bench.long_contexts_fit:
        requests = make(4, [*common[:3], {"top_k": 20}], length=bench.long_context)
        yield LosslessWorkload(name="long contexts", requests=requests, limit=4, interruptions=0.2)
    while True:
        for limit in (bench.batch, max(1, bench.batch // 2), max(1, bench.batch // 9)):
            requests = make(min(bench.batch, 3 * limit), common)
            yield LosslessWorkload(name=f"batch of {limit}", requests=requests, limit=limit)


def workloads_for(bench: LosslessBench) -> Iterator[LosslessWorkload]:
    """Every rare kind once, then common workloads until `bench.tokens` tokens are reached."""
    count, rare = 0, len(KVPolicy) + 2 + bench.long_contexts_fit
    for index, workload in enumerate(workloads(bench)):
        yield workload
        # Weight updates change the tokens of a response, but not their number.
        count += sum(r.params.max_tokens for r in workload.requests if r.params.ignore_eos)
        if index >= rare and count >= bench.tokens:
            return


class _Requests:
    """Makes requests with distinct ids, whose prompts are pieces of the policy's own texts."""

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
        # Every eighth request has stop tokens, so it may end within a series of accepted drafts.
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
