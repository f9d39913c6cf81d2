"""Speculation against plain decoding, bit for bit: token ids and both log-probs of every token.

Each workload (`workloads`) is generated once without drafts, and once with each draft proposer.
With drafts, selectors change during the run, plans are chains and trees, requests are preempted,
aborted and resumed, and weights are updated (`driver`). Each proposer gets one row, with the
compared tokens, the identical tokens, and the number of each event.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

import torch

from slipstream.bench.lossless.driver import (
    PLANS,
    Response,
    SwitchingSelector,
    make_engine,
    replay,
    response_of,
    run_with_drafts,
    run_with_updates,
    versions_of,
)
from slipstream.bench.lossless.targets import eagle3_head, with_vocabulary
from slipstream.bench.lossless.workloads import (
    COPY,
    RENEWED,
    LosslessBench,
    LosslessWorkload,
    workloads_for,
)
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.speculation.drafters import LyingOracle, counting, history_of
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.quantized import QuantizedProposer
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.quantized import why_not_quantized
from slipstream.types import WeightUpdate

HISTORY_LIES, ORACLE_LIES = 1 / 16, 0.2

EVENTS = (
    *("accepted", "siblings", "rejected", "switched", "preempted", "aborted", "resumed"),
    *("updated", "renewed"),
)
"""Events that are counted. `siblings` are accepted drafts that were not the first draft at their
position. `renewed` counts updates of a draft vocabulary."""


@dataclass(slots=True)
class Tally:
    """Counts of one proposer over all workloads."""

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
        """Mean tokens per verification, including the bonus token."""
        return 1 + self.events["accepted"] / max(1, self.verifications)


def run(bench: LosslessBench, say: Callable[[str], None] = lambda line: None) -> list[ResultRow]:
    """Check all workloads; one row per proposer. `say` gets a line per workload and proposer.

    The quantized copy is left out, with a line, if the policy cannot have one.
    """
    tallies = {name: Tally() for name in bench.proposers}
    decoder = bench.target.decoder
    reason = why_not_quantized(decoder.config, bench.dtype, decoder.device)
    if reason is not None and tallies.pop(COPY, None) is not None:
        say(f"{bench.target.name}, {COPY}: not checked, because {reason}")
    plain_seconds = 0.0
    for workload in workloads_for(bench):
        started = time.perf_counter()
        plain = _plain(bench, workload)
        plain_seconds += time.perf_counter() - started
        for name, tally in tallies.items():
            before = tally.tokens, tally.identical
            started = time.perf_counter()
            _check(bench, workload, name, plain, tally)
            tally.seconds += time.perf_counter() - started
            new, equal = tally.tokens - before[0], tally.identical - before[1]
            say(
                f"{bench.target.name}, {workload.name}, {name}: {equal:,} of {new:,} tokens "
                f"identical, {tally.accept_length:.2f} per verification so far, "
                f"{time.perf_counter() - started:.1f} s"
            )
    return [_row(bench, name, tally, plain_seconds) for name, tally in tallies.items()]


def total(rows: Sequence[ResultRow], name: str) -> int:
    """The sum of a value over all rows."""
    values = [row.values[name] for row in rows]
    return int(sum(value for value in values if not isinstance(value, Spread)))


def different(rows: Sequence[ResultRow]) -> int:
    """The number of tokens that differ."""
    return total(rows, "tokens") - total(rows, "identical")


def counts(rows: Sequence[ResultRow]) -> dict[str, int]:
    """Compared tokens, identical tokens, and the number of each event."""
    return {name: total(rows, name) for name in ("tokens", "identical", *EVENTS)}


def _check(
    bench: LosslessBench,
    workload: LosslessWorkload,
    name: str,
    plain: Mapping[str, Response],
    tally: Tally,
) -> None:
    """Generate a workload with drafts, compare it with `plain`, and add the counts to `tally`."""
    known = {name: written[0] for name, written in plain.items()}
    renewals: Iterator[WeightUpdate] | None = None
    if name == RENEWED:
        head, updates = with_vocabulary(bench.target)
        renewals = cycle(updates)
        proposer = counting(EagleProposer(head, dtype=bench.dtype, free_cache=False))
    else:
        proposer = counting(_proposer(name, bench, workload, known))
    selector = SwitchingSelector()
    engine = make_engine(bench, workload.limit, proposer, selector)
    rng = Random(f"{workload.name} {workload.requests[0].request_id} {name}")
    if workload.updates is None:
        done = run_with_drafts(engine, selector, workload, rng, tally.events, renewals)
        expected = plain
    else:
        policies = versions_of(bench.target.decoder)
        generations = run_with_updates(
            engine, selector, workload, policies, rng, tally.events, renewals
        )
        done = {g.request_id: response_of(g) for g in generations}
        expected = replay(bench, workload, generations, policies)
    stats = engine.stats()
    tally.events.update(
        accepted=stats.accepted_tokens,
        siblings=stats.sibling_tokens,
        rejected=stats.draft_tokens - stats.accepted_tokens,
        preempted=stats.preempted,
        aborted=stats.aborted,
    )
    tally.verifications += proposer.verifications
    tally.largest_batch = max(tally.largest_batch, stats.max_batch)
    for request in workload.requests:
        written, wanted = done[request.request_id], expected[request.request_id]
        tally.tokens += max(len(written[0]), len(wanted[0]))
        tally.identical += identical_tokens(written, wanted)
        tally.responses += 1
        length = len(request.prompt_ids) + len(written[0])
        tally.longest_context = max(tally.longest_context, length)


def identical_tokens(left: Response, right: Response) -> int:
    """The number of positions with equal token ids and equal bits of both log-probs."""
    pairs = zip(zip(*left, strict=True), zip(*right, strict=True), strict=False)
    return sum(_bits(*a) == _bits(*b) for a, b in pairs)


def _bits(token: int, log_prob: float, sampling_log_prob: float) -> bytes:
    return struct.pack("<qdd", token, log_prob, sampling_log_prob)


def _plain(bench: LosslessBench, workload: LosslessWorkload) -> dict[str, Response]:
    """Responses without drafts, with all requests in one batch: a larger batch than with drafts."""
    generations = make_engine(bench, len(workload.requests)).run(workload.requests)
    return {g.request_id: response_of(g) for g in generations}


def _proposer(
    name: str, bench: LosslessBench, workload: LosslessWorkload, known: Mapping[str, Sequence[int]]
) -> Proposer:
    vocab_size = bench.target.decoder.config.vocab_size
    if name == COPY:
        return QuantizedProposer()
    if name == "eagle3 head":
        return EagleProposer(eagle3_head(bench.target), dtype=bench.dtype, free_cache=False)
    if name in ("eagle head", "union"):
        head = EagleProposer(bench.target.head, dtype=bench.dtype, free_cache=False)
        if name == "eagle head":
            return head
    if name in ("seeded history", "union"):
        history = history_of(workload.requests, known, vocab_size=vocab_size, lies=HISTORY_LIES)
        return UnionProposer(head, history) if name == "union" else history
    return LyingOracle(known, vocab_size=vocab_size, lies=ORACLE_LIES)


def _row(bench: LosslessBench, name: str, tally: Tally, plain_seconds: float) -> ResultRow:
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
    return ResultRow(
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
