"""Decoding without drafts by batch size: the embedded engine against peers, interleaved.

All contenders run the same model, and all responses have the same length. Each round runs each
contender twice: for one new token, and for all new tokens. The difference is the time of decoding,
without prefill and without the start of a batch. Our engine works as in rollouts: behind the
asynchronous protocol, with log-probs. The benchmark also measures the cost of exact mode
(`inexact`), the share of a step outside the model (`step_share`), and how near a step comes to the
time in which this machine reads the weights from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch

from slipstream.bench.contenders import (
    OURS,
    PEERS,
    UNSAMPLED,
    Contender,
    Workload,
    contender,
    embedded,
)
from slipstream.bench.inexact import inexact
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.rollout import fastest_peer, recorded, same_tokens
from slipstream.bench.shapes import BenchModel, matmul_parameters
from slipstream.bench.speculation.roofline import as_many_bytes
from slipstream.bench.step_share import step_shares
from slipstream.bench.timing import Times, alternate, ratio
from slipstream.errors import ConfigError, EngineError, check_at_least_one
from slipstream.inference.engine import Engine
from slipstream.training.compute_thread import ComputeThread

FLOORS = {"vllm": 0.85}
"""Our promised speed over the best setting of a peer, on `FLOOR_SHAPE`."""

FLOOR_SHAPE = "d512x12"

INEXACT = f"{OURS}-torch"
"""Our engine without the rules of exact mode, computing with torch's operations."""

_IDLE = "cores_busy_when_idle"

READ = "reading the weights"
"""Name of the work that reads as many bytes as decoding reads weights."""

READ_SHARE = "share_of_read_rate"
"""Key of a row's values: the time in which the machine reads the weights of all steps, over the
time of decoding."""

_BUSY_SHARE = 0.8
"""Busy cores per thread of our engine below which the summary warns of other programs."""

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "q8_0": 34 / 32}
"""Bytes per weight in memory. Q8_0 stores a scale of two bytes for each block of 32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench:
    """One measurement. `temperature` 0 is greedy. `vocab_size` replaces the shape's; None keeps
    it. With `folder`, the model is the one in that Hugging Face folder. `only` names the contenders
    of the peers to measure; empty: all."""

    shape: str = FLOOR_SHAPE
    vocab_size: int | None = 1024
    folder: Path | None = None
    batches: tuple[int, ...] = (1, 8, 32)
    peers: tuple[str, ...] = ("hf",)
    only: tuple[str, ...] = ()
    prompt_length: int = 16
    new_tokens: int = 128
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    rounds: int = 5

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
            if self.only and not set(self.only) & set(PEERS[peer]):
                raise ConfigError(
                    f"only={self.only} leaves no contender of {peer}; give one of "
                    f"{', '.join(PEERS[peer])}"
                )
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batches={self.batches}: every batch size must be at least 1")
        if self.new_tokens < 3:
            raise ConfigError(
                f"new_tokens={self.new_tokens} must be at least 3: the first token comes from "
                "prefill, and decoding must be longer than one step"
            )
        check_at_least_one(self, "vocab_size", "prompt_length", "rounds")

    @property
    def model(self) -> BenchModel:
        return BenchModel(shape=self.shape, vocab_size=self.vocab_size, folder=self.folder)

    @property
    def title(self) -> str:
        """The name of the model in tables and rows."""
        return self.shape if self.folder is None else str(self.folder)


def make_workload(bench: DecodeBench, batch: int, new_tokens: int) -> Workload:
    """Random prompts, the same in each call, with responses of `new_tokens` tokens."""
    random, vocab_size = Random(batch), bench.model.config.vocab_size
    prompts = tuple(
        tuple(random.randrange(vocab_size) for _ in range(bench.prompt_length))
        for _ in range(batch)
    )
    return Workload(name=f"batch {batch}", prompts=prompts, lengths=(new_tokens,) * batch)


def run(
    bench: DecodeBench, *, say: Callable[[str], None] = lambda _: None
) -> Iterator[list[ResultRow]]:
    """Measure; yields, per batch size, one row per contender, ours first. `say` gets progress."""
    peers = [name for peer in bench.peers for name in PEERS[peer]]
    names = (OURS, *(name for name in peers if name in bench.only or not bench.only))
    with ExitStack() as stack:
        compute = ComputeThread()
        stack.callback(compute.close)

        def load(name: str) -> Contender:
            return stack.enter_context(
                contender(
                    name,
                    model=bench.model,
                    max_positions=bench.prompt_length + bench.new_tokens,
                    dtype=bench.dtype,
                    temperature=bench.temperature,
                    compute=compute,
                )
            )

        contenders: dict[str, Contender] = {}
        for name in names:
            say(f"loading {name}")
            contenders[name] = load(name)
            if name == OURS:
                with inexact():
                    another = load(name)
                contenders[INEXACT] = replace(another, generate=_inexactly(another))
        # On this thread, filling the tensor would leave OpenMP threads that slow down ours.
        weights = compute.run(
            lambda: as_many_bytes(bench.dtype, bench.model.config, torch.device("cpu"))
        )

        def read() -> None:
            for _ in range(bench.new_tokens - 1):
                weights.sum()

        for batch in bench.batches:
            say(f"batch {batch}: {len(contenders)} contenders, interleaved")
            yield _measure(bench, batch, contenders, lambda: compute.run(read))


def _inexactly(made: Contender) -> Callable[[Workload], list[list[int]]]:
    def generate(workload: Workload) -> list[list[int]]:
        with inexact():
            return made.generate(workload)

    return generate


def _measure(
    bench: DecodeBench,
    batch: int,
    contenders: Mapping[str, Contender],
    read: Callable[[], None],
) -> list[ResultRow]:
    outputs: dict[str, list[list[int]]] = {}
    works: dict[str, Callable[[], None]] = {}
    first, all_of_them = (make_workload(bench, batch, n) for n in (1, bench.new_tokens))
    for name, each in contenders.items():
        each.answers.clear()
        works[_prefill(name)] = recorded(name, each.generate, {}, first)
        works[name] = recorded(name, each.generate, outputs, all_of_them)
    clocks = {
        key: each.cpu_clock for name, each in contenders.items() for key in (name, _prefill(name))
    }
    works[READ] = read
    times = alternate(works, rounds=bench.rounds, cpu_clocks=clocks)
    decoded = {name: decode_times(times[name], times[_prefill(name)]) for name in contenders}
    return [
        _row(bench, batch, name, each, decoded, outputs, times[_prefill(name)], times[READ])
        for name, each in contenders.items()
    ]


def _prefill(name: str) -> str:
    return f"{name}, one token"


def decode_times(whole: Times, prefill: Times) -> Times:
    """The times of whole responses minus the times of their first tokens, round by round.

    Raises EngineError if a difference is not positive: noise then hides the time of decoding.
    """
    pairs = [
        [a - b for a, b in zip(left, right, strict=True)]
        for left, right in ((whole.wall, prefill.wall), (whole.cpu, prefill.cpu))
    ]
    if min(pairs[0]) <= 0:
        raise EngineError(
            "a whole response took no longer than its first token, so decoding cannot be timed; "
            "raise --new-tokens"
        )
    return Times(*pairs)


def _row(
    bench: DecodeBench,
    batch: int,
    name: str,
    measured: Contender,
    decoded: Mapping[str, Times],
    outputs: Mapping[str, list[list[int]]],
    prefill: Times,
    read: Times,
) -> ResultRow:
    steps, seconds = bench.new_tokens - 1, decoded[name].wall
    # The bytes of this contender's weights over those that were read.
    size = BYTES_PER_WEIGHT[measured.dtype] / bench.dtype.itemsize
    values: dict[str, float | Spread] = {
        "tokens_per_second": Spread.of([batch * steps / s for s in seconds]),
        "ms_per_step": Spread.of([1000 * s / steps for s in seconds]),
        "slipstream_speedup": ratio(seconds, decoded[OURS].wall),
        "prefill_seconds": Spread.of(prefill.wall),
        "cpu_seconds": Spread.of(decoded[name].cpu),
        "cores_busy": ratio(decoded[name].cpu, seconds),
        READ_SHARE: ratio([size * s for s in read.wall], seconds),
        "read_gigabytes_per_second": Spread.of(
            [steps * _weight_bytes(bench) / s / 1e9 for s in read.wall]
        ),
    }
    if bench.temperature == 0 and name not in UNSAMPLED:
        values["same_tokens"] = same_tokens(outputs[name], outputs[OURS])
    if measured.answers:
        # Only whole responses, without the warm-up round.
        whole = [a for a in measured.answers if len(a["token_ids"][0]) == bench.new_tokens]
        shares = [answer["busiest_cpu_seconds"] / answer["seconds"] for answer in whole]
        values["cores_busy_in_one_process"] = Spread.of(shares[-bench.rounds :])
        # Summed up, because CPU time has a resolution of 10 ms and idle times may be shorter.
        idle, idle_cpu = (
            sum(answer[key] for answer in measured.answers)
            for key in ("idle_seconds", "idle_cpu_seconds")
        )
        values[_IDLE] = idle_cpu / idle
    return ResultRow(
        benchmark="decode",
        case=f"batch {batch}",
        contender=name,
        dtype=measured.dtype,
        threads=measured.threads,
        seconds=Spread.of(seconds),
        machine=this_machine(measured.versions),
        values=values,
        settings={
            "batch": batch,
            "peers": " ".join(bench.peers),
            **{k: v for k, v in asdict(bench).items() if isinstance(v, str | int | float)},
            "shape": bench.title,
            "vocab_size": bench.model.config.vocab_size,
        },
    )


def _weight_bytes(bench: DecodeBench) -> int:
    """Bytes of the weights that a decode step of our engine reads."""
    return bench.dtype.itemsize * sum(matmul_parameters(bench.model.config))


def run_step_shares(bench: DecodeBench) -> dict[str, Spread]:
    """The shares of a decode step of the embedded engine, at the smallest batch size."""
    batch = min(bench.batches)
    workload = make_workload(bench, batch, bench.new_tokens)
    compute = ComputeThread()

    def measure(engine: Engine) -> dict[str, Spread]:
        return step_shares(engine, workload, temperature=bench.temperature, rounds=bench.rounds)

    try:
        with embedded(
            lambda: bench.model.decoder(workload.max_positions),
            workload.max_positions,
            bench.dtype,
            compute,
        ) as engine:
            core = engine.core
            assert isinstance(core, Engine)
            return compute.run(lambda: measure(core))
    finally:
        compute.close()


def best_of(rows: Sequence[ResultRow], peer: str, dtype: str | None = None) -> ResultRow | None:
    """The fastest contender of `peer` in the rows of one case, of `dtype` if given; None if no
    such contender ran. Contenders that choose no tokens do not count."""
    names = set(PEERS[peer]) - set(UNSAMPLED)
    ran = [row for row in rows if row.contender in names and dtype in (None, row.dtype)]
    return fastest_peer(ran) if ran else None


def cases(rows: Sequence[ResultRow]) -> list[dict[str, object]]:
    """By shape, batch size and peer: our tokens per second, those of the peer's fastest contender,
    and the ratio of the times."""
    found: list[dict[str, object]] = []
    for shape, case in dict.fromkeys((row.settings["shape"], row.case) for row in rows):
        of_case = [r for r in rows if (r.settings["shape"], r.case) == (shape, case)]
        ours = next(row for row in of_case if row.contender == OURS)
        for peer in PEERS:
            best = best_of(of_case, peer)
            if best is not None:
                found.append(
                    {
                        "shape": shape,
                        "batch": ours.settings["batch"],
                        "tokens_per_second": _spread(ours, "tokens_per_second").median,
                        "peer": best.contender,
                        "peer_tokens_per_second": _spread(best, "tokens_per_second").median,
                        "ratio": _spread(best, "slipstream_speedup").median,
                    }
                )
    return found


def table(rows: Sequence[ResultRow]) -> str:
    """The rows of one case, one line each. The last column is our speed over theirs.

    `cores` is the number of busy cores of all processes of a contender, `in one` that of its
    busiest process: a process that only polls for work also keeps a core busy.
    """
    lines = [
        f"    {'':<28}{'tokens/s':>9}  {'least .. most':<16}{'ms/step':>8}"
        f"{'cores':>7}{'in one':>8}  ours/theirs"
    ]
    for row in rows:
        speed, step = _spread(row, "tokens_per_second"), _spread(row, "ms_per_step")
        busy, speedup = _spread(row, "cores_busy"), _spread(row, "slipstream_speedup")
        alone = row.values.get("cores_busy_in_one_process", busy)
        assert isinstance(alone, Spread)
        lines.append(
            f"    {row.contender:<28}{speed.median:>9.1f}  "
            f"{f'{speed.min:.1f} .. {speed.max:.1f}':<16}{step.median:>8.2f}"
            f"{busy.median:>7.2f}{alone.median:>8.2f}  "
            f"{speedup.median:.2f} [{speedup.min:.2f} .. {speedup.max:.2f}]"
        )
    return "\n".join(lines)


def summary(bench: DecodeBench, rows: Sequence[ResultRow]) -> str:
    """Lines below the table: our speed over the best of each peer, and the cost of exact mode."""
    ours = next(row for row in rows if row.contender == OURS)
    lines = []
    for peer in bench.peers:
        found = [best_of(rows, peer, dtype) for dtype in (ours.dtype, None)]
        shown = [
            f"{_spread(row, 'slipstream_speedup').median:.2f}x in {dtype} ({row.contender})"
            for row, dtype in zip(found, (ours.dtype, "any dtype"), strict=True)
            if row is not None
        ]
        if peer in FLOORS and bench.title == FLOOR_SHAPE:
            shown.append(f"floor {FLOORS[peer]}")
        lines.append(f"    over the best of {peer}: {', '.join(shown)}")
    inexact_row = next(row for row in rows if row.contender == INEXACT)
    cost = 1 / _spread(inexact_row, "slipstream_speedup").median
    lines.append(f"    exact mode takes {cost:.2f}x the time of torch's own operations")
    lines += _read_shares(bench, rows)
    busy = _spread(ours, "cores_busy").median
    if ours.threads is not None and busy < _BUSY_SHARE * ours.threads:
        lines.append(
            f"    our steps kept only {busy:.2f} cores busy with {ours.threads} threads, so other "
            "programs were running: these ratios say little; measure again on an idle machine"
        )
    idle = [value for row in rows if isinstance(value := row.values.get(_IDLE), float)]
    if idle:
        lines.append(f"    a waiting peer process kept at most {max(idle):.2f} cores busy")
    return "\n".join(lines)


def _read_shares(bench: DecodeBench, rows: Sequence[ResultRow]) -> list[str]:
    """At batch 1: how near each contender comes to the time that reading its weights takes."""
    if rows[0].settings["batch"] != 1:
        return []
    rate = _spread(rows[0], "read_gigabytes_per_second").median
    read = _weight_bytes(bench) / 1e9
    shares = [f"{row.contender} {100 * _spread(row, READ_SHARE).median:.0f} %" for row in rows]
    return [
        f"    a step reads {1000 * read:.0f} MB of weights in {rows[0].dtype}; this machine reads "
        f"them at {rate:.1f} GB/s in {1000 * read / rate:.2f} ms",
        f"    share of that rate: {', '.join(shares)}",
    ]


def _spread(row: ResultRow, name: str) -> Spread:
    value = row.values[name]
    assert isinstance(value, Spread)
    return value
