"""Speculation against plain decoding, bit for bit: token ids and both log-probs of every token.

Each wave (see `waves`) is generated plainly once and then with each proposer, while selectors take
turns, each with chains and trees, and requests are preempted, aborted, resumed and updated (see
`driving`). A proposer has one row: what was compared, what was equal, and what happened.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from slipstream.bench.lossless.driver import (
    PLANS,
    Shifting,
    Written,
    make_engine,
    replay,
    run_with_drafts,
    run_with_updates,
    versions_of,
    written_by,
)
from slipstream.bench.lossless.targets import eagle3_head
from slipstream.bench.lossless.workloads import LosslessBench, LosslessWorkload, enough
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.speculation.drafters import Counted, LyingOracle, history_of
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.union import UnionProposer

HISTORY_LIES, ORACLE_LIES = 1 / 16, 0.2

EVENTS = (
    *("accepted", "siblings", "rejected", "switched", "preempted", "aborted", "resumed"),
    "updated",
)
"""`siblings`: accepted drafts that were not the first ones after the tokens before them."""


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


def run(bench: LosslessBench, say: Callable[[str], None] = lambda line: None) -> list[ResultRow]:
    """Check everything; a row per proposer. `say` gets a line per wave and proposer."""
    tallies = {name: Tally() for name in bench.proposers}
    plain_seconds = 0.0
    for wave in enough(bench):
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


def total(rows: Sequence[ResultRow], name: str) -> int:
    """The sum of one of the values."""
    values = [row.values[name] for row in rows]
    return int(sum(value for value in values if not isinstance(value, Spread)))


def different(rows: Sequence[ResultRow]) -> int:
    """Tokens that were not identical."""
    return total(rows, "tokens") - total(rows, "identical")


def counts(rows: Sequence[ResultRow]) -> dict[str, int]:
    """What was compared and what was equal, and how often each event happened."""
    return {name: total(rows, name) for name in ("tokens", "identical", *EVENTS)}


def _check(
    bench: LosslessBench,
    wave: LosslessWorkload,
    name: str,
    plain: Mapping[str, Written],
    tally: Tally,
) -> None:
    """Generate a wave with drafts, compare, and add to `tally`."""
    known = {name: written[0] for name, written in plain.items()}
    proposer = Counted(_proposer(name, bench, wave, known))
    shifting = Shifting()
    engine = make_engine(bench, wave.limit, proposer, shifting)
    rng = Random(f"{wave.name} {wave.requests[0].request_id} {name}")
    if wave.updates is None:
        done = run_with_drafts(engine, shifting, wave, rng, tally.events)
        expected = plain
    else:
        policies = versions_of(bench.target.decoder)
        generations = run_with_updates(engine, shifting, wave, policies, rng, tally.events)
        done = {g.request_id: written_by(g) for g in generations}
        expected = replay(bench, wave, generations, policies)
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


def _plain(bench: LosslessBench, wave: LosslessWorkload) -> dict[str, Written]:
    """Plain responses, all requests of the wave at once: another batch than under drafts."""
    generations = make_engine(bench, len(wave.requests)).run(wave.requests)
    return {g.request_id: written_by(g) for g in generations}


def _proposer(
    name: str, bench: LosslessBench, wave: LosslessWorkload, known: Mapping[str, Sequence[int]]
) -> Proposer:
    vocab_size = bench.target.decoder.config.vocab_size
    if name == "eagle3 head":
        return EagleProposer(eagle3_head(bench.target), dtype=bench.dtype, free_cache=False)
    if name in ("eagle head", "union"):
        head = EagleProposer(bench.target.head, dtype=bench.dtype, free_cache=False)
        if name == "eagle head":
            return head
    if name in ("seeded history", "union"):
        history = history_of(wave.requests, known, vocab_size=vocab_size, lies=HISTORY_LIES)
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
