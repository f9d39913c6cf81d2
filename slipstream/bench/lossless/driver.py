"""The lossless driver: generates a workload with drafts and events, and replays it without drafts.

Events are changes of the draft plan, preemptions, aborts with later resumption, and weight updates.
With drafts, each request is at some token when the weights are updated; the run without drafts
updates them at the same token of each request (`replay`). Used by `check`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random

import torch

from slipstream.bench.lossless.workloads import LosslessBench, LosslessWorkload
from slipstream.errors import EngineError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    UpperConfidenceBound,
    buckets_by_rows,
)
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import (
    CostModelSelector,
    PredefinedSelector,
    StepRecord,
    StrategySelector,
)
from slipstream.models.decoder import Decoder
from slipstream.types import GenerateRequest, Generation, KVPolicy, WeightUpdate

CHAINS = tuple(DraftPlan.chain(drafts) for drafts in (1, 3, 5))
TREES = (DraftPlan(2, 3, 6), DraftPlan(4, 2, 8), DraftPlan(6, 4, 16))
PLANS = (OFF, *CHAINS, *TREES)

Response = tuple[list[int], list[float], list[float]]
"""One response: token ids, log-probs under the full distribution, and log-probs under the sampling
distribution."""


class SwitchingSelector:
    """`StrategySelector` that follows one of several selectors, and can switch to another: fixed
    plans, the cost model and FastRL's bandits. All of them record every step."""

    def __init__(self) -> None:
        chosen: list[StrategySelector] = [CostModelSelector(PLANS)]
        chosen += [
            BanditSelector({1: PLANS}, rule) for rule in (EpsilonGreedy(), UpperConfidenceBound())
        ]
        sizes = [2**i for i in range(len({plan.verify_tokens for plan in PLANS}))]
        chosen.append(BanditSelector(buckets_by_rows(PLANS, sizes), EpsilonGreedy()))
        self._all = [*map(PredefinedSelector, PLANS), *chosen]
        self._now = 0

    def shift(self, rng: Random) -> None:
        """Switch to another selector."""
        self._now = (self._now + rng.randrange(1, len(self._all))) % len(self._all)

    def begin_rollout(self, requests: int) -> int:
        """Returns 0: no steps without drafts at the start."""
        return 0

    def select(self, running: int) -> DraftPlan:
        """The plan of the current selector."""
        return [selector.select(running) for selector in self._all][self._now]

    def record(self, step: StepRecord) -> None:
        """Pass a finished step to all selectors."""
        for selector in self._all:
            selector.record(step)

    def changed(self, *, drafter: bool = False) -> None:
        """Tell all selectors that the weights changed."""
        for selector in self._all:
            selector.changed(drafter=drafter)


def make_engine(
    bench: LosslessBench,
    limit: int,
    proposer: Proposer | None = None,
    selector: SwitchingSelector | None = None,
) -> Engine:
    """An engine with its own copy of the weights, because updates write into them."""
    settings = EngineSettings(
        max_model_len=bench.target.decoder.config.context_limit.tokens,
        dtype=bench.dtype,
        max_num_seqs=limit,
        free_cache_engine=False,
    )
    policy = deepcopy(bench.target.decoder)
    return Engine(policy, settings, proposer=proposer, selector=selector)


def run_with_drafts(
    engine: Engine,
    selector: SwitchingSelector,
    workload: LosslessWorkload,
    rng: Random,
    events: Counter[str],
    renewals: Iterator[WeightUpdate] | None = None,
) -> dict[str, Response]:
    """Generate a workload while plans switch and requests are preempted, aborted and resumed.

    `renewals` are updates of the draft head, which come now and then.
    """
    done: dict[str, Response] = {r.request_id: ([], [], []) for r in workload.requests}
    open_requests = {r.request_id: r for r in workload.requests}
    for request in workload.requests:
        engine.add(request)
    while engine.has_work():
        _switch(selector, rng, events)
        _renew(engine, renewals, rng, events)
        for generation in engine.step():
            _append(done, generation)
            del open_requests[generation.request_id]
        if open_requests and rng.random() < 0.2 * workload.interruptions:
            engine.preempt(rng.choices(list(open_requests), k=2))
        if open_requests and rng.random() < 0.1 * workload.interruptions:
            for part in engine.abort([rng.choice(list(open_requests))]):
                _append(done, part)
                request = _remaining(open_requests[part.request_id], part)
                open_requests[part.request_id] = request
                engine.add(request)
                events["resumed"] += 1
    return done


def _remaining(request: GenerateRequest, part: Generation) -> GenerateRequest:
    """The remaining request after an abort: its tokens so far become prior tokens."""
    params = replace(request.params, max_tokens=request.params.max_tokens - len(part.token_ids))
    return replace(request, prior_ids=(*request.prior_ids, *part.token_ids), params=params)


def _append(done: dict[str, Response], part: Generation) -> None:
    for whole, new in zip(done[part.request_id], response_of(part), strict=True):
        whole.extend(new)  # type: ignore[attr-defined]


def response_of(generation: Generation) -> Response:
    return generation.token_ids, generation.log_probs, generation.sampling_log_probs


def _switch(selector: SwitchingSelector, rng: Random, events: Counter[str]) -> None:
    if rng.random() < 0.3:
        selector.shift(rng)
        events["switched"] += 1


def _renew(
    engine: Engine, renewals: Iterator[WeightUpdate] | None, rng: Random, events: Counter[str]
) -> None:
    if renewals is not None and rng.random() < 0.2:
        engine.update_drafter(next(renewals))
        events["renewed"] += 1


def run_with_updates(
    engine: Engine,
    selector: SwitchingSelector,
    workload: LosslessWorkload,
    policies: Sequence[Decoder],
    rng: Random,
    events: Counter[str],
    renewals: Iterator[WeightUpdate] | None = None,
) -> list[Generation]:
    """Generate a workload with drafts; the weights are updated twice, a few steps apart."""
    assert workload.updates is not None
    done: list[Generation] = []
    for request in workload.requests:
        engine.add(request)
    for version, policy in enumerate(policies):
        if version:
            engine.update_weights(_update(policy, version, workload.updates))
            events["updated"] += sum(r.request_id not in _ids(done) for r in workload.requests)
        for _ in range(rng.randrange(2, 5) if policy is not policies[-1] else sys.maxsize):
            if not engine.has_work():
                break
            _switch(selector, rng, events)
            _renew(engine, renewals, rng, events)
            done += engine.step()
            if rng.random() < 0.3:
                engine.preempt([rng.choice(workload.requests).request_id])
    return done


def replay(
    bench: LosslessBench,
    workload: LosslessWorkload,
    generations: Sequence[Generation],
    policies: Sequence[Decoder],
) -> dict[str, Response]:
    """Responses without drafts, with each weight update at the same token as in `generations`.

    Without drafts, all requests of a batch are at the same token. So requests whose updates came at
    the same tokens are generated together. Raises EngineError if such a token is not reached.
    """
    assert workload.updates is not None
    requests = {r.request_id: r for r in workload.requests}
    groups: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for generation in generations:
        cuts = tuple((span.version, span.start) for span in generation.spans)
        groups[cuts].append(generation.request_id)
    expected: dict[str, Response] = {}
    for cuts, names in groups.items():
        engine = make_engine(bench, len(names))
        done: list[Generation] = []
        for version, start in cuts:
            if start == 0:
                engine.update_weights(_update(policies[version], version, workload.updates))
                for name in names:
                    engine.add(requests[name])
                continue
            while engine.has_work() and engine.stats().generated_tokens < start * len(names):
                done += engine.step()
            if engine.stats().generated_tokens != start * len(names) or done:
                raise EngineError(f"{names}: plain decoding does not stop at token {start}")
            engine.update_weights(_update(policies[version], version, workload.updates))
        while engine.has_work():
            done += engine.step()
        for generation in done:
            expected[generation.request_id] = response_of(generation)
    return expected


def _ids(generations: Iterable[Generation]) -> set[str]:
    return {g.request_id for g in generations}


def versions_of(decoder: Decoder) -> list[Decoder]:
    """The policy, and two changed versions of it, as training might produce."""
    policies = [decoder]
    for version in (1, 2):
        other = deepcopy(policies[-1])
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in other.parameters():
                if parameter.ndim == 2:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.03 * parameter.std() * noise)
        policies.append(other)
    return policies


def _update(decoder: Decoder, version: int, policy: KVPolicy) -> WeightUpdate:
    tensors = [(name, p.detach()) for name, p in decoder.named_parameters()]
    return WeightUpdate(version=version, buckets=[tensors], kv_policy=policy)
