"""Speculation against plain decoding, bit for bit: token ids and both log-probs of every token.

    waves     what is generated: batches of 1 to 64, sampled, greedy and cut laws, contexts past
              1,024; under drafts, plans switch and requests are preempted, aborted and resumed
    updates   weights change in mid-request, wherever the drafts have come to by then; the plain run
              changes them at the same token of each request (`replay`)

Each wave is generated plainly once and then with each proposer. A proposer has one row: what was
compared, what was equal, and what happened. Nothing is timed but the whole.
"""

from __future__ import annotations

import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from slipstream.bench.drafters import Counted, LyingOracle, history_of
from slipstream.bench.record import Row, Spread, this_machine
from slipstream.bench.targets import Target
from slipstream.errors import EngineError, check_at_least_one
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.models.decoder import Decoder
from slipstream.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    NoiseKey,
    SamplingParams,
    WeightUpdate,
)

PROPOSERS = ("eagle head", "seeded history", "lying oracle")
"""The history is seeded with the plain responses, a token in `HISTORY_LIES` wrong, beside what it
sees itself; the oracle is no drafter (see `drafters`)."""

HISTORY_LIES, ORACLE_LIES = 1 / 16, 0.2
PLANS = (OFF, DraftPlan.chain(1), DraftPlan.chain(3), DraftPlan.chain(5))

EVENTS = ("accepted", "rejected", "switched", "preempted", "aborted", "resumed", "updated")

Written = tuple[list[int], list[float], list[float]]
"""Of one response: token ids, full log-probs, log-probs of the law that was sampled from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests that are generated together, at most `limit` at a time."""

    name: str
    requests: Sequence[GenerateRequest]
    limit: int
    updates: KVPolicy | None = None
    """Where weights are updated twice under way: what becomes of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessBench:
    """One check: at least `tokens` tokens of `target` are compared with each of the proposers.

    `batch` is that of the common waves. Raises ConfigError for counts below 1.
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
        return needed <= self.target.decoder.config.max_position_embeddings


@dataclass(slots=True)
class Tally:
    """What a proposer has been through."""

    tokens: int = 0
    identical: int = 0
    responses: int = 0
    verifications: int = 0
    largest_batch: int = 0
    longest_context: int = 0
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)

    @property
    def accept_length(self) -> float:
        """Tokens of a verification, bonus included."""
        return 1 + self.events["accepted"] / max(1, self.verifications)


def run(bench: LosslessBench, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Check everything; a row per proposer. `say` gets a line per wave and proposer."""
    tallies = {name: Tally() for name in bench.proposers}
    plain_seconds = 0.0
    for wave in _enough(bench):
        started = time.perf_counter()
        plain = _plain(bench, wave)
        plain_seconds += time.perf_counter() - started
        for name, tally in tallies.items():
            before = tally.tokens, tally.identical
            started = time.perf_counter()
            _check(bench, wave, name, plain, tally)
            tally.seconds += time.perf_counter() - started
            new, equal = tally.tokens - before[0], tally.identical - before[1]
            say(
                f"{bench.target.name}, {wave.name}, {name}: {equal:,} of {new:,} tokens identical, "
                f"{tally.accept_length:.2f} a verification so far, "
                f"{time.perf_counter() - started:.1f} s"
            )
    return [_row(bench, name, tally, plain_seconds) for name, tally in tallies.items()]


def total(rows: Sequence[Row], name: str) -> int:
    """The sum of one of the values."""
    values = [row.values[name] for row in rows]
    return int(sum(value for value in values if not isinstance(value, Spread)))


def different(rows: Sequence[Row]) -> int:
    """Tokens that were not identical."""
    return total(rows, "tokens") - total(rows, "identical")


def waves(bench: LosslessBench) -> Iterator[Wave]:
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
    yield Wave(name="one at a time", requests=make(2, common), limit=1)
    yield Wave(name="cut laws", requests=make(2 * few, cut), limit=few)
    for policy in KVPolicy:
        name = f"weight updates, {policy.value}"
        yield Wave(name=name, requests=make(few, common), limit=few, updates=policy)
    if bench.long_contexts_fit:
        requests = make(4, [*common[:3], {"top_k": 20}], length=bench.long_context)
        yield Wave(name="long contexts", requests=requests, limit=4)
    while True:
        for limit in (bench.batch, max(1, bench.batch // 2), max(1, bench.batch // 9)):
            requests = make(min(bench.batch, 3 * limit), common)
            yield Wave(name=f"batch of {limit}", requests=requests, limit=limit)


def _enough(bench: LosslessBench) -> Iterator[Wave]:
    count, rare = 0, len(KVPolicy) + 2 + bench.long_contexts_fit
    for index, wave in enumerate(waves(bench)):
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


def _check(
    bench: LosslessBench, wave: Wave, name: str, plain: Mapping[str, Written], tally: Tally
) -> None:
    """Generate a wave with drafts, compare, and add to `tally`."""
    known = {name: written[0] for name, written in plain.items()}
    proposer = Counted(_proposer(name, bench, wave, known))
    engine = _engine(bench, wave.limit, proposer)
    rng = Random(f"{wave.name} {wave.requests[0].request_id} {name}")
    if wave.updates is None:
        done = drive(engine, wave.requests, rng, tally.events)
        expected = plain
    else:
        policies = _policies(bench.target.decoder)
        generations = _drive_updates(engine, wave, policies, rng, tally.events)
        done = {g.request_id: _written(g) for g in generations}
        expected = replay(bench, wave, generations, policies)
    stats = engine.stats()
    tally.events.update(
        accepted=stats.accepted_tokens,
        rejected=stats.draft_tokens - stats.accepted_tokens,
        preempted=stats.preempted,
        aborted=stats.aborted,
    )
    tally.verifications += proposer.verifications
    tally.largest_batch = max(tally.largest_batch, stats.max_batch)
    for request in wave.requests:
        written, wanted = done[request.request_id], expected[request.request_id]
        tally.tokens += max(len(written[0]), len(wanted[0]))
        tally.identical += identical_tokens(written, wanted)
        tally.responses += 1
        length = len(request.prompt_ids) + len(written[0])
        tally.longest_context = max(tally.longest_context, length)


def identical_tokens(left: Written, right: Written) -> int:
    """Places at which two responses have the same id and the same bits of both log-probs."""
    pairs = zip(zip(*left, strict=True), zip(*right, strict=True), strict=False)
    return sum(_bits(*a) == _bits(*b) for a, b in pairs)


def _bits(token: int, log_prob: float, sampling_log_prob: float) -> bytes:
    return struct.pack("<qdd", token, log_prob, sampling_log_prob)


def drive(
    engine: Engine, requests: Sequence[GenerateRequest], rng: Random, events: Counter[str]
) -> dict[str, Written]:
    """Generate `requests` while plans switch and requests are preempted, aborted and resumed."""
    done: dict[str, Written] = {r.request_id: ([], [], []) for r in requests}
    open_requests = {r.request_id: r for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        _switch(engine, rng, events)
        for generation in engine.step():
            _append(done, generation)
            del open_requests[generation.request_id]
        if open_requests and rng.random() < 0.2:
            engine.preempt(rng.choices(list(open_requests), k=2))
        if open_requests and rng.random() < 0.1:
            for part in engine.abort([rng.choice(list(open_requests))]):
                _append(done, part)
                request = _rest(open_requests[part.request_id], part)
                open_requests[part.request_id] = request
                engine.add(request)
                events["resumed"] += 1
    return done


def _rest(request: GenerateRequest, part: Generation) -> GenerateRequest:
    """What is left of a request after an abort."""
    params = replace(request.params, max_tokens=request.params.max_tokens - len(part.token_ids))
    return replace(request, prior_ids=(*request.prior_ids, *part.token_ids), params=params)


def _append(done: dict[str, Written], part: Generation) -> None:
    for whole, new in zip(done[part.request_id], _written(part), strict=True):
        whole.extend(new)  # type: ignore[attr-defined]


def _written(generation: Generation) -> Written:
    return generation.token_ids, generation.log_probs, generation.sampling_log_probs


def _switch(engine: Engine, rng: Random, events: Counter[str]) -> None:
    if rng.random() < 0.3:
        plan = rng.choice([plan for plan in PLANS if plan != engine.plan])
        engine.plan = plan
        events["switched"] += 1


def _drive_updates(
    engine: Engine, wave: Wave, policies: Sequence[Decoder], rng: Random, events: Counter[str]
) -> list[Generation]:
    """Generate a wave; the weights change twice, after some steps each."""
    assert wave.updates is not None
    done: list[Generation] = []
    for request in wave.requests:
        engine.add(request)
    for version, policy in enumerate(policies):
        if version:
            engine.update_weights(_update(policy, version, wave.updates))
            events["updated"] += sum(r.request_id not in _ids(done) for r in wave.requests)
        for _ in range(rng.randrange(2, 5) if policy is not policies[-1] else sys.maxsize):
            if not engine.has_work():
                break
            _switch(engine, rng, events)
            done += engine.step()
            if rng.random() < 0.3:
                engine.preempt([rng.choice(wave.requests).request_id])
    return done


def replay(
    bench: LosslessBench,
    wave: Wave,
    generations: Sequence[Generation],
    policies: Sequence[Decoder],
) -> dict[str, Written]:
    """Plain responses of a wave with each update at the token where `generations` had it.

    Without drafts, requests that begin together keep in step: those that were updated at the same
    tokens are generated together. Raises EngineError where a place cannot be reached.
    """
    assert wave.updates is not None
    requests = {r.request_id: r for r in wave.requests}
    groups: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for generation in generations:
        cuts = tuple((span.version, span.start) for span in generation.spans)
        groups[cuts].append(generation.request_id)
    expected: dict[str, Written] = {}
    for cuts, names in groups.items():
        engine = _engine(bench, len(names))
        done: list[Generation] = []
        for version, start in cuts:
            if start == 0:
                engine.update_weights(_update(policies[version], version, wave.updates))
                for name in names:
                    engine.add(requests[name])
                continue
            while engine.stats().generated_tokens < start * len(names):
                done += engine.step()
            if engine.stats().generated_tokens > start * len(names) or done:
                raise EngineError(f"{names}: plain decoding does not stop at token {start}")
            engine.update_weights(_update(policies[version], version, wave.updates))
        while engine.has_work():
            done += engine.step()
        for generation in done:
            expected[generation.request_id] = _written(generation)
    return expected


def _ids(generations: Iterable[Generation]) -> set[str]:
    return {g.request_id for g in generations}


def _policies(decoder: Decoder) -> list[Decoder]:
    """The policy and two that it might become in training."""
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


def _plain(bench: LosslessBench, wave: Wave) -> dict[str, Written]:
    """Plain responses, all requests of the wave at once: another batch than under drafts."""
    generations = _engine(bench, len(wave.requests)).run(wave.requests)
    return {g.request_id: _written(g) for g in generations}


def _engine(bench: LosslessBench, limit: int, proposer: Proposer | None = None) -> Engine:
    """An engine with weights of its own: updates write into them."""
    settings = EngineSettings(
        max_model_len=bench.target.decoder.config.max_position_embeddings,
        dtype=bench.dtype,
        max_num_seqs=limit,
    )
    plan = OFF if proposer is None else DraftPlan.chain(3)
    return Engine(deepcopy(bench.target.decoder), settings, proposer=proposer, plan=plan)


def _proposer(
    name: str, bench: LosslessBench, wave: Wave, known: Mapping[str, Sequence[int]]
) -> Proposer:
    vocab_size = bench.target.decoder.config.vocab_size
    if name == "eagle head":
        return EagleProposer(bench.target.head, dtype=bench.dtype)
    if name == "seeded history":
        return history_of(wave.requests, known, vocab_size=vocab_size, lies=HISTORY_LIES)
    return LyingOracle(known, vocab_size=vocab_size, lies=ORACLE_LIES)


def _row(bench: LosslessBench, name: str, tally: Tally, plain_seconds: float) -> Row:
    values: dict[str, float | Spread] = {
        "tokens": tally.tokens,
        "identical": tally.identical,
        "responses": tally.responses,
        "accept_length": tally.accept_length,
        "verifications": tally.verifications,
        **{event: tally.events[event] for event in EVENTS},
        "largest_batch": tally.largest_batch,
        "longest_context": tally.longest_context,
        "plain_seconds": plain_seconds,
    }
    config = bench.target.decoder.config
    return Row(
        benchmark="lossless",
        case=bench.target.name,
        contender=name,
        dtype=str(bench.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        seconds=Spread.of([tally.seconds]),
        machine=this_machine(),
        values=values,
        settings={
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "plans": " ".join(map(str, PLANS)),
            "history_lies": HISTORY_LIES,
            "oracle_lies": ORACLE_LIES,
        },
    )
