"""What speculation gains, on a trained policy with a trained head, in turns with plain decoding
(`slipstream bench rollout --policy`).

64 responses of log-normal length: the whole, and the tail of four or fewer requests. Among the
contenders is an oracle that drafts the right tokens at no cost: no drafter that drafts as deep can
gain more on this engine and machine; and the same in the time that the head takes to draft, which
no training of the head can pass. At the other end is a head that was never trained: with it the
rollout should not be slower than plain decoding, beyond what a second plain engine differs by.
Depth by batch size is `grid`, on the same policy and head.

Engines are called directly, on one thread. Every speculative contender must write the very tokens
of plain decoding, or the benchmark fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from slipstream.bench.contenders import SPECULATING, VLLM, Workload, vllm_contender
from slipstream.bench.record import Machine, ResultRow, Spread, median_of, this_machine
from slipstream.bench.rollout import same_tokens
from slipstream.bench.speculation.drafters import LyingOracle, RightHead
from slipstream.bench.speculation.roofline import MachineRates, least_seconds, measure_rates
from slipstream.bench.speculation.trained import (
    CANDIDATES,
    CPU,
    LONG_TAIL,
    Responses,
    Trained,
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
from slipstream.inference.speculation.selector import CostModelSelector
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.types import GenerateRequest

PLAIN = "plain"
AGAIN = "plain_again"
UNTRAINED = "untrained"
ORACLE = "oracle"
RIGHT_HEAD = "right_head"

CHAINS = "chains"

DEPTHS = (1, 2, 3, 5, 7, 11)

TREES = ("4_2_6", "4_2_8", "6_2_8", "6_2_12", "6_4_16", "8_2_10", "8_4_16", "8_4_32", "12_2_14")
"""Levels, tokens followed of each, tokens verified, as in FastRL's grid."""

TAIL_CLASSES = sum(limit <= 4 for limit in BATCH_LIMITS)
"""Classes of `EngineStats.batch_seconds` with four or fewer requests."""

LEAST = "least_seconds"
"""By the machine's own rates, which are measured in each round."""

FLOORS = {"whole": 1.7, "tail": 1.8}
"""What the project promises over its own plain decoding at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationBench:
    """Of responses to `candidates` prompts `batch` are in the rollout, the longest `spread` times
    the median; `batches` and responses of `new_tokens` or more in the grid, at least two different
    batches and `least_responses` of each size, by `plans` (none: those of `plans()`) and without
    drafts, and by `selectors` or not. Raises ConfigError for impossible values."""

    policy: Path
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    plans: tuple[DraftPlan, ...] = ()
    selectors: bool = True
    rounds: int = 5
    batch: int = 64
    spread: float = 16.0
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    new_tokens: int = 64
    least_responses: int = 24
    candidates: int = CANDIDATES
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "rounds", "batch", "new_tokens", "least_responses", "candidates")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: PyTorch finds no GPU here; give --device cpu")
        if OFF in self.plans or len(set(self.plans)) < len(self.plans):
            raise ConfigError(
                f"--plan {' '.join(map(str, self.plans))}: name each once; no drafts are measured "
                "anyway"
            )
        if self.spread < LONG_TAIL:
            raise ConfigError(
                f"--spread {self.spread:g}: a tail is long from {LONG_TAIL:g} times the median"
            )
        known = VLLM | SPECULATING
        unknown = [name for name in self.peers if name not in known]
        if unknown:
            raise ConfigError(f"unknown peer {unknown[0]!r}; known: {', '.join(known)}")
        wrong = [name for name in self.peers if name in SPECULATING]
        if self.peers and self.device.type != "cpu":
            raise ConfigError(f"--peer {self.peers[0]} decodes on the CPU; leave out --device")
        if wrong and self.temperature > 0:
            raise ConfigError(
                f"{wrong[0]} is measured greedily only, for above temperature 0 its tokens are "
                "wrong on a CPU; give --greedy"
            )

    @property
    def in_grid(self) -> list[DraftPlan]:
        """Of the grid: OFF first."""
        return [OFF, *self.plans] if self.plans else plans()


def chains() -> list[DraftPlan]:
    """OFF first."""
    return [OFF, *(DraftPlan.chain(depth) for depth in DEPTHS)]


def plans() -> list[DraftPlan]:
    """Of the grid: chains, then trees."""
    return [*chains(), *map(DraftPlan.parse, TREES)]


Tokens = Sequence[Sequence[int]]


class Generator:
    """An engine and what it did in each round."""

    def __init__(
        self,
        engine: Engine,
        batches: Sequence[Sequence[GenerateRequest]],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """A round is all `batches`, one after the other; `prepare` is called before it."""
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
        """Tokens per second of decode steps of few requests, round by round."""
        tail = slice(0, TAIL_CLASSES)
        return [
            sum(s.batch_tokens[tail]) / sum(s.batch_seconds[tail]) for s in self.stats[-rounds:]
        ]

    def accept_length(self, rounds: int) -> float:
        """The median of the last rounds."""
        return median(s.accept_length for s in self.stats[-rounds:])

    def on_fraction(self, rounds: int) -> float:
        """Share of decoding time in steps that draft: the median of the last rounds."""
        return median(s.on_fraction for s in self.stats[-rounds:])


def run_rollout(bench: SpeculationBench, say: Callable[[str], None]) -> list[ResultRow]:
    """The long-tailed rollout: plain, and once more, with drafts that are hardly ever right, with
    chains of a head, with its trees too, with history, with both, with drafts that always are
    right, in the head's time and in none, and peers."""
    trained = load_trained(bench.policy, bench.device, bench.candidates)
    say(f"{len(trained.prompts)} responses of {bench.policy} to choose from")
    natural = natural_responses(trained, bench.temperature, bench.dtype)
    chosen = long_tailed(natural, bench.batch, bench.spread)
    plain = make_engine(trained, bench.dtype)
    known = {g.request_id: g.token_ids for g in plain.run(chosen.requests)}
    rates: list[MachineRates] = []
    vocabulary = trained.decoder.config.vocab_size

    def oracle() -> LyingOracle:
        return LyingOracle(known, vocab_size=vocabulary, lies=0.0)

    alone, beside = HistoryProposer(), HistoryProposer()
    # Histories forget before each round: they would know the responses of the last one. What is
    # about as fast as plain decoding runs next to it, so that little changes in between.
    proposers: dict[str, tuple[Proposer, Callable[[], object]]] = {
        UNTRAINED: (make_eagle(_untrained(trained), bench.dtype), lambda: None),
        CHAINS: (make_eagle(trained, bench.dtype), lambda: None),
        "eagle": (make_eagle(trained, bench.dtype), lambda: None),
        "history": (alone, alone.forget),
        "union": (UnionProposer(make_eagle(trained, bench.dtype), beside), beside.forget),
        RIGHT_HEAD: (RightHead(make_eagle(trained, bench.dtype), oracle()), lambda: None),
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
                vllm_contender(
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
        # Two rounds to warm up: the selector measures in them.
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


def _least(
    trained: Trained, rates: Sequence[MachineRates], chosen: Responses, drafts: int
) -> dict[str, Spread]:
    """By the rates of each round."""
    prompts = [len(r.prompt_ids) for r in chosen.requests]
    config = trained.decoder.config
    least = [least_seconds(config, r, prompts, chosen.lengths, drafts) for r in rates]
    return {
        LEAST: Spread.of(least),
        "machine_gflops": Spread.of([r.flops / 1e9 for r in rates]),
        "machine_gigabytes_per_second": Spread.of([r.bytes / 1e9 for r in rates]),
    }


def most_possible(rows: Sequence[ResultRow]) -> dict[str, float]:
    """What drafts that are right and free gain over plain decoding in a rollout: `whole` and `tail`
    on this engine, and `roofline`, the whole on one that wastes nothing of what the machine can
    do; `right_head`, the whole in the time that the head takes to draft."""
    by_name = {row.contender: row for row in rows}
    oracle = by_name[ORACLE]
    return {
        "whole": _median(oracle, "speculative_over_plain"),
        "tail": _median(oracle, "tail_speculative_over_plain"),
        "right_head": _median(by_name[RIGHT_HEAD], "speculative_over_plain"),
        "roofline": _median(by_name[PLAIN], LEAST) / _median(oracle, LEAST),
    }


def gains(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By who drafts: speed over plain decoding on the whole and while few requests run, and tokens
    a verification."""
    ours = [row for row in rows if "tail_speculative_over_plain" in row.values]
    over = {
        row.contender: {
            "whole": _median(row, "speculative_over_plain"),
            "tail": _median(row, "tail_speculative_over_plain"),
        }
        for row in ours
    }
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
        rates = mine.tail_rates(bench.rounds)
        values["tail_tokens_per_second"] = Spread.of(rates)
        values["tail_speculative_over_plain"] = ratio(rates, plain.tail_rates(bench.rounds))
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
        benchmark="rollout",
    )


def _median(row: ResultRow, name: str) -> float:
    return median_of(row.values[name])


def make_eagle(trained: Trained, dtype: torch.dtype) -> EagleProposer:
    """With the policy's head, as rollouts have it."""
    record = CudaRecorder() if trained.decoder.device.type == "cuda" else None
    return EagleProposer(trained.head, dtype=dtype, free_cache=False, record=record)


def _untrained(trained: Trained) -> Trained:
    """The policy, and a head as it is before training."""
    head = DraftHead(trained.decoder.config)
    head.init_weights(seed=0)
    return replace(trained, head=head.to(trained.decoder.device))


def check_same(bench: SpeculationBench, name: str, written: Tokens, plain: Tokens) -> float:
    """The share of tokens that are those of plain decoding: all of them on a CPU; on a GPU, whose
    libraries round otherwise for other numbers of rows, responses part now and then.

    Raises EngineError where a contender wrote other tokens on a CPU.
    """
    if bench.device.type == "cpu" and written != plain:
        raise EngineError(f"{name} wrote other tokens than plain decoding: a bug in the engine")
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
    """What `name` took, under the bench's settings and more."""
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
