"""The speedup by drafts for a trained policy and its head, interleaved with plain decoding
(`slipstream bench rollout --policy`).

The rollout has 64 responses of log-normal lengths, chosen from many. With `samples` it has the
responses to the first prompts as the policy wrote them. The benchmark reports the whole rollout,
and its tail with four or fewer running requests. Two contenders give upper bounds: an oracle drafts
the correct tokens at no cost, so no proposer with the same depth can gain more on this engine and
machine; and an oracle in the head's time, which no training of the head can exceed. An untrained
head gives a lower bound: with it the rollout should not be slower than plain decoding, up to the
difference of a second plain engine. `grid` measures depth by batch size, with the same policy and
head.

Engines are called directly, on one thread. On a CPU every contender with drafts must write exactly
the tokens of plain decoding, or the benchmark fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from slipstream.bench.contenders import (
    LLAMA,
    SPECULATING,
    UNSAMPLED,
    VLLM,
    Workload,
    peer_contender,
)
from slipstream.bench.record import Machine, ResultRow, Spread, median_of, this_machine
from slipstream.bench.rollout import same_tokens
from slipstream.bench.speculation.drafters import LyingOracle, OracleHead
from slipstream.bench.speculation.roofline import MachineRates, least_seconds, measure_rates
from slipstream.bench.speculation.trained import (
    CANDIDATES,
    CPU,
    LONG_TAIL,
    Responses,
    Trained,
    as_written,
    load_trained,
    long_tailed,
    make_engine,
    natural_responses,
)
from slipstream.bench.timing import Times, alternate, ratio
from slipstream.checkpoint.layout import policy_folder
from slipstream.errors import ConfigError, EngineError, check_at_least_one
from slipstream.inference.engine import Engine
from slipstream.inference.engine.recorder import CudaRecorder
from slipstream.inference.protocol import BATCH_LIMITS, EngineStats
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.quantized import QuantizedProposer
from slipstream.inference.speculation.selector import CostModelSelector
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.quantized import why_not_quantized
from slipstream.models.quantized_linear import Bits
from slipstream.run.engine_metrics import BATCH_NAMES
from slipstream.types import GenerateRequest

PLAIN = "plain"
AGAIN = "plain_again"
UNTRAINED = "untrained"
ORACLE = "oracle"
RIGHT_HEAD = "right_head"

CHAINS = "chains"

DEPTHS = (1, 2, 3, 5, 7, 11)

TREES = ("4_2_6", "4_2_8", "6_2_8", "6_2_12", "6_4_16", "8_2_10", "8_4_16", "8_4_32", "12_2_14")
"""Steps, top-k and tokens to verify of each tree, written as in FastRL's grid."""

TAIL_CLASSES = sum(limit <= 4 for limit in BATCH_LIMITS)
"""Number of batch-size classes of `EngineStats.batch_seconds` with four or fewer requests."""

_TAIL = "tail_speculative_over_plain"

LEAST = "least_seconds"
"""Key of a row's values: the least time by the machine's rates, which each round measures."""

FLOORS = {"whole": 1.7, "tail": 1.8}
"""The promised speedup over our own plain decoding, at temperature 1, for a chosen long tail."""

_NATURAL_FLOOR, _SHARE_OF_GAIN = 1.5, 0.75
"""The parts of `natural_floor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationBench:
    """Settings of the rollout and of the grid. Raises ConfigError for impossible values.

    The policy first answers `candidates` prompts. The rollout takes `batch` of these responses, the
    longest of which has `spread` times the median length. With `samples` it takes the first
    responses instead, `samples` per prompt. With `copy_bits` it also measures drafts by a quantized
    copy of the policy with weights of 4 or 8 bits. The grid measures `plans` (empty: those
    of `plans()`) and no drafts, at the batch sizes `batches`, with responses of at least
    `new_tokens` tokens, at least two batches and `least_responses` responses per size; with
    `selectors` it also measures selectors.
    """

    policy: Path
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    plans: tuple[DraftPlan, ...] = ()
    selectors: bool = True
    rounds: int = 5
    batch: int = 64
    spread: float = 16.0
    samples: int | None = None
    copy_bits: Bits | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    new_tokens: int = 64
    least_responses: int = 24
    candidates: int = CANDIDATES
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "rounds", "batch", "new_tokens", "least_responses", "candidates")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: PyTorch finds no GPU; give --device cpu")
        if OFF in self.plans or len(set(self.plans)) < len(self.plans):
            raise ConfigError(
                f"--plan {' '.join(map(str, self.plans))}: name each plan once, and leave out "
                f"{OFF}: decoding without drafts is always measured"
            )
        if self.spread < LONG_TAIL:
            raise ConfigError(
                f"--spread {self.spread:g} is no long tail; give at least {LONG_TAIL:g}"
            )
        if self.samples is not None and (self.samples < 1 or self.batch % self.samples):
            raise ConfigError(
                f"--samples {self.samples} must be at least 1 and divide --batch {self.batch}"
            )
        known = [name for name in (*VLLM, *SPECULATING, *LLAMA) if name not in UNSAMPLED]
        unknown = [name for name in self.peers if name not in known]
        if unknown:
            raise ConfigError(f"unknown peer {unknown[0]!r}; known: {', '.join(known)}")
        wrong = [name for name in self.peers if name in SPECULATING]
        if self.peers and self.device.type != "cpu":
            raise ConfigError(f"--peer {self.peers[0]} runs on the CPU; leave out --device")
        if wrong and self.temperature > 0:
            raise ConfigError(
                f"--peer {wrong[0]} needs --greedy: on a CPU it samples wrong tokens at "
                "temperatures above 0"
            )

    @property
    def grid_plans(self) -> list[DraftPlan]:
        """The plans of the grid, OFF first."""
        return [OFF, *self.plans] if self.plans else plans()


def chains() -> list[DraftPlan]:
    """OFF, then a chain of each depth."""
    return [OFF, *(DraftPlan.chain(depth) for depth in DEPTHS)]


def plans() -> list[DraftPlan]:
    """The default plans of the grid: OFF, chains, then trees."""
    return [*chains(), *map(DraftPlan.parse, TREES)]


Tokens = Sequence[Sequence[int]]


class Generator:
    """An engine, and its tokens and counts in each round."""

    def __init__(
        self,
        engine: Engine,
        batches: Sequence[Sequence[GenerateRequest]],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """A round decodes all `batches`, one after another. `prepare` is called before a round."""
        self.engine = engine
        self.batches = batches
        self.prepare = prepare
        self.tokens: list[list[int]] = []
        self.stats: list[EngineStats] = []

    def __call__(self) -> None:
        self.prepare()
        before = self.engine.stats()
        done = [g for batch in self.batches for g in self.engine.run(batch)]
        self.tokens = [g.token_ids for g in done]
        self.stats.append(self.engine.stats().since(before))

    def tail_rates(self, rounds: int) -> list[float]:
        """Tokens per second in decode steps with four or fewer requests, round by round; empty if a
        round had none, because more requests ended together."""
        tail, stats = slice(0, TAIL_CLASSES), self.stats[-rounds:]
        if not all(sum(s.batch_seconds[tail]) for s in stats):
            return []
        return [sum(s.batch_tokens[tail]) / sum(s.batch_seconds[tail]) for s in stats]

    def shares_of_time(self, rounds: int) -> dict[str, float]:
        """Share of the decoding time by batch-size class (`BATCH_NAMES`), over the last rounds."""
        sums = [
            sum(of) for of in zip(*(s.batch_seconds for s in self.stats[-rounds:]), strict=True)
        ]
        return {name: part / sum(sums) for name, part in zip(BATCH_NAMES, sums, strict=True)}

    def accept_length(self, rounds: int) -> float:
        """Mean accepted length: the median over the last rounds."""
        return median(s.accept_length for s in self.stats[-rounds:])

    def on_fraction(self, rounds: int) -> float:
        """Share of the decoding time in steps with drafts: the median over the last rounds."""
        return median(s.on_fraction for s in self.stats[-rounds:])


def run_rollout(bench: SpeculationBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure the rollout; one row per contender.

    The contenders: plain decoding, twice; an untrained head; the head with chains only; the head
    with chains and trees; history; head and history; with `bench.copy_bits` a quantized copy, and
    the copy and history; the oracle in the head's time; the oracle at no cost; and `bench.peers`.
    """
    if bench.samples is None:
        trained = load_trained(bench.policy, bench.device, bench.candidates)
        say(f"{len(trained.prompts)} responses of {bench.policy} to choose from")
        natural = natural_responses(trained, bench.temperature, bench.dtype)
        chosen = long_tailed(natural, bench.batch, bench.spread)
    else:
        trained = load_trained(bench.policy, bench.device, bench.batch // bench.samples)
        if len(trained.prompts) * bench.samples < bench.batch:
            raise ConfigError(
                f"--batch {bench.batch} with --samples {bench.samples}: {bench.policy} has "
                f"{len(trained.prompts)} prompts; lower --batch"
            )
        say(f"{len(trained.prompts)} prompts of {bench.policy}, {bench.samples} responses each")
        natural = natural_responses(trained, bench.temperature, bench.dtype, bench.samples)
        chosen = as_written(natural)
    plain = make_engine(trained, bench.dtype)
    known = {g.request_id: g.token_ids for g in plain.run(chosen.requests)}
    rates: list[MachineRates] = []
    vocabulary = trained.decoder.config.vocab_size

    def oracle() -> LyingOracle:
        return LyingOracle(known, vocab_size=vocabulary, lies=0.0)

    history, union_history = HistoryProposer(), HistoryProposer()
    # Histories forget before each round, or they would know the responses of the last round. The
    # untrained head, about as fast as plain decoding, runs right after it: less speed drift
    # between.
    proposers: dict[str, tuple[Proposer, Callable[[], object]]] = {
        UNTRAINED: (make_eagle(_untrained(trained), bench.dtype), lambda: None),
        CHAINS: (make_eagle(trained, bench.dtype), lambda: None),
        "eagle": (make_eagle(trained, bench.dtype), lambda: None),
        "history": (history, history.forget),
        "union": (
            UnionProposer(make_eagle(trained, bench.dtype), union_history),
            union_history.forget,
        ),
        **_copies(bench, trained),
        RIGHT_HEAD: (OracleHead(make_eagle(trained, bench.dtype), oracle()), lambda: None),
        ORACLE: (oracle(), lambda: None),
    }
    generators = {PLAIN: Generator(plain, [chosen.requests])}
    generators[AGAIN] = Generator(make_engine(trained, bench.dtype), [chosen.requests])
    for name, (proposer, prepare) in proposers.items():
        branches = name in (UNTRAINED, "eagle", "union")
        selector = CostModelSelector(plans() if branches else chains())
        engine = make_engine(trained, bench.dtype, proposer=proposer, selector=selector)
        generators[name] = Generator(engine, [chosen.requests], prepare)
    calls: dict[str, Callable[[], object]] = dict(generators)
    config = trained.decoder.config
    calls["machine"] = lambda: rates.append(measure_rates(bench.dtype, config, bench.device))
    with ExitStack() as stack:
        cpu_clocks: dict[str, Callable[[], float]] = {}
        machines: dict[str, Machine] = {}
        for name in bench.peers:
            say(f"starting {name}")
            peer = stack.enter_context(
                peer_contender(
                    name, policy_folder(bench.policy), trained.max_model_len, bench.temperature
                )
            )
            workload = Workload(
                name="rollout",
                prompts=tuple(tuple(r.prompt_ids) for r in chosen.requests),
                lengths=tuple(chosen.lengths),
            )
            calls[name] = partial(peer.generate, workload)
            cpu_clocks[name] = peer.cpu_clock
            machines[name] = this_machine(peer.versions)
        # Two warm-up rounds, in which the selector takes its first measurements.
        times = alternate(calls, rounds=bench.rounds, warm_up=2, cpu_clocks=cpu_clocks)
    for name, generator in generators.items():
        check_same(bench, name, generator.tokens, generators[PLAIN].tokens)
    least = {
        name: _least(trained, rates[-bench.rounds :], chosen, drafts)
        for name, drafts in ((PLAIN, 0), (ORACLE, max(DEPTHS)))
    }
    return [
        replace(
            _rollout_row(bench, name, times, generators, chosen, least.get(name, {})),
            machine=machines.get(name, _machine_of(bench)),
        )
        for name in (*generators, *bench.peers)
    ]


def _copies(
    bench: SpeculationBench, trained: Trained
) -> dict[str, tuple[Proposer, Callable[[], object]]]:
    """A quantized copy of the policy, and the copy and history, with `bench.copy_bits`.

    Raises ConfigError if the policy cannot have a quantized copy.
    """
    if bench.copy_bits is None:
        return {}
    reason = why_not_quantized(trained.decoder.config, bench.dtype, bench.device)
    if reason is not None:
        raise ConfigError(f"--copy-bits {bench.copy_bits}: {reason}; leave it out")
    history = HistoryProposer()
    both = UnionProposer(QuantizedProposer(bench.copy_bits, bench.copy_bits), history)
    return {
        "quantized": (QuantizedProposer(bench.copy_bits, bench.copy_bits), lambda: None),
        "quantized_union": (both, history.forget),
    }


def _least(
    trained: Trained, rates: Sequence[MachineRates], chosen: Responses, drafts: int
) -> dict[str, Spread]:
    """The least time by the rates of each round, and the rates."""
    prompts = [len(r.prompt_ids) for r in chosen.requests]
    config = trained.decoder.config
    least = [least_seconds(config, r, prompts, chosen.lengths, drafts) for r in rates]
    return {
        LEAST: Spread.of(least),
        "machine_gflops": Spread.of([r.flops / 1e9 for r in rates]),
        "machine_gigabytes_per_second": Spread.of([r.bytes / 1e9 for r in rates]),
    }


def upper_bounds(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Upper bounds for the speed over plain decoding, with drafts that are all accepted.

    `whole` and `tail`: drafts at no cost on this engine. `right_head`: the whole rollout, with
    drafts in the head's time. `roofline`: the whole rollout on an engine that reaches the machine's
    rates.
    """
    by_name = {row.contender: row for row in rows}
    oracle = by_name[ORACLE]
    return {
        **_by_part(oracle),
        "right_head": _median(by_name[RIGHT_HEAD], "speculative_over_plain"),
        "roofline": _median(by_name[PLAIN], LEAST) / _median(oracle, LEAST),
    }


def natural_floor(rows: Sequence[ResultRow]) -> float:
    """The promised speedup for responses as written: 1.5, or 75 % of the gain of drafts that are
    all accepted in the head's time, whichever is smaller."""
    return min(_NATURAL_FLOOR, 1 + _SHARE_OF_GAIN * (upper_bounds(rows)["right_head"] - 1))


def _by_part(row: ResultRow) -> dict[str, float]:
    """Speed over plain decoding for the whole rollout and, if it has one, for its tail."""
    parts = {"whole": "speculative_over_plain", "tail": _TAIL}
    return {part: _median(row, name) for part, name in parts.items() if name in row.values}


def gains(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By contender: speed over plain decoding for the whole rollout and for its tail, and mean
    accepted length."""
    ours = [row for row in rows if "accept_length" in row.values]
    over = {row.contender: _by_part(row) for row in ours}
    lengths = {row.contender: _median(row, "accept_length") for row in ours}
    return {"speculative_over_plain": over, "accept_length": lengths}


def _rollout_row(
    bench: SpeculationBench,
    name: str,
    times: Mapping[str, Times],
    generators: Mapping[str, Generator],
    chosen: Responses,
    least: Mapping[str, Spread],
) -> ResultRow:
    values: dict[str, float | Spread] = {
        "tokens_per_second": Spread.of([sum(chosen.lengths) / s for s in times[name].wall]),
        "speculative_over_plain": ratio(times[PLAIN].wall, times[name].wall),
        **least,
    }
    if name in generators:
        mine, plain = generators[name], generators[PLAIN]
        rates, plain_rates = mine.tail_rates(bench.rounds), plain.tail_rates(bench.rounds)
        if rates and plain_rates:
            values["tail_tokens_per_second"] = Spread.of(rates)
            values[_TAIL] = ratio(rates, plain_rates)
        for name_of_class, share in mine.shares_of_time(bench.rounds).items():
            values[f"share_{name_of_class}"] = share
        values["accept_length"] = mine.accept_length(bench.rounds)
        values["on_fraction"] = mine.on_fraction(bench.rounds)
        values["same_tokens"] = same_tokens(mine.tokens, plain.tokens)
    else:
        best = min(
            generators.keys() - {AGAIN, UNTRAINED, RIGHT_HEAD, ORACLE},
            key=lambda n: median(times[n].wall),
        )
        values["slipstream_speedup"] = ratio(times[name].wall, times[best].wall)
        values["slipstream_plain_speedup"] = ratio(times[name].wall, times[PLAIN].wall)
    more = {"samples": bench.samples, "copy_bits": bench.copy_bits}
    return row_of(
        bench,
        "trained policy",
        name,
        Spread.of(times[name].wall),
        values,
        tokens=sum(chosen.lengths),
        median_length=median(chosen.lengths),
        longest=max(chosen.lengths),
        batch=bench.batch,
        **{name: n for name, n in more.items() if n is not None},
        benchmark="rollout",
    )


def _median(row: ResultRow, name: str) -> float:
    return median_of(row.values[name])


def make_eagle(trained: Trained, dtype: torch.dtype) -> EagleProposer:
    """A draft proposer with the policy's head, as rollouts use it."""
    record = CudaRecorder() if trained.decoder.device.type == "cuda" else None
    return EagleProposer(trained.head, dtype=dtype, free_cache=False, record=record)


def _untrained(trained: Trained) -> Trained:
    """The policy with an untrained head."""
    head = DraftHead(trained.decoder.config)
    head.init_weights(seed=0)
    return replace(trained, head=head.to(trained.decoder.device))


def check_same(bench: SpeculationBench, name: str, written: Tokens, plain: Tokens) -> float:
    """The share of tokens that equal plain decoding's. It is 1 on a CPU. GPU libraries round
    differently for other batch shapes, so responses can diverge on a GPU.

    Raises EngineError if a contender wrote other tokens on a CPU.
    """
    if bench.device.type == "cpu" and written != plain:
        raise EngineError(f"{name} wrote other tokens than plain decoding: a bug of the engine")
    return same_tokens(written, plain)


def _machine_of(bench: SpeculationBench) -> Machine:
    cuda = bench.device.type == "cuda"
    return this_machine(gpu=torch.cuda.get_device_name(bench.device) if cuda else "")


def row_of(
    bench: SpeculationBench,
    case: str,
    name: str,
    seconds: Spread,
    values: Mapping[str, float | Spread],
    *,
    benchmark: str = "speculation",
    **settings: float,
) -> ResultRow:
    """The row of contender `name`, with the bench's settings and `settings`."""
    peer = (VLLM | SPECULATING).get(name)
    return ResultRow(
        benchmark=benchmark,
        case=case,
        contender=name,
        dtype=str(bench.dtype).removeprefix("torch.") if peer is None else peer.dtype,
        threads=torch.get_num_threads() if peer is None else peer.given_threads,
        seconds=seconds,
        machine=_machine_of(bench),
        values=dict(values),
        settings={"policy": str(bench.policy), "temperature": bench.temperature, **settings},
    )
