"""Scoring: answers per second through a reward manager, and the cost of slow and stuck functions.

Each kind of answer is scored by its built-in function: in a loop (`alone`), and through the reward
manager of rollouts; both are interleaved. Math answers that a library computes are scored in worker
processes; there, `alone` is the library in this process. Then come 128 responses at once whose
function sleeps one second, and 128 responses in processes, one of which never returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from slipstream.bench.record import ResultRow, Spread, median_of, this_machine
from slipstream.bench.timing import Times, alternate
from slipstream.errors import check_at_least_one
from slipstream.rewards.functions import default_compute_score, worker_pool_of
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.prime import PrimeRewardManager
from slipstream.rewards.protocol import RewardManager
from slipstream.rewards.scorers import math_verified
from slipstream.rewards.scorers.boxed import last_boxed
from slipstream.types import Sample, Segment, Status

ALONE = "alone"

RATE_FLOOR = 2000.0
"""The fewest answers per second through the manager, for answers that are compared as text."""

SLOW_FLOOR = 2.0
"""The most seconds for 128 responses whose function sleeps one second."""

STUCK_FLOOR = 1.5
"""The most seconds after its deadline that a function that never returns may cost."""

_SLEEP_S, _DEADLINE_S = 1.0, 2.0

_ANSWERS: dict[str, tuple[Callable[[int], str], Callable[[int], Any]]] = {
    "gsm8k": (lambda i: f"Adding up gives {i}.\n#### {i}", str),
    "lighteval/MATH": (
        lambda i: rf"So it is $\boxed{{\dfrac{{{i}}}{{7}}}}$.",
        lambda i: rf"\frac{{{i}}}{{7}}",
    ),
    "math_dapo": (lambda i: f"So it is.\nAnswer: ${i}$", str),
    "searchR1_nq": (lambda i: f"<answer>the {i}!</answer>", lambda i: {"target": [f"The {i}"]}),
    "exact_match": (str, str),
    "math_verify": (
        lambda i: rf"So it is $\boxed{{\frac{{{i}}}{{7}}\pi}}$.",
        lambda i: rf"\frac{{{2 * i}}}{{14}}\pi",
    ),
    "numina_olympiads": (
        lambda i: rf"\boxed{{{i}.5\pi}}",
        lambda i: rf"\frac{{{2 * i + 1}}}{{2}}\pi",
    ),
}
"""By data source: the i-th response, and its ground truth. All responses are correct. Those of the
last two are not plain numbers, so that the library compares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringBench:
    """`answers` of each kind per round; `responses` for the slow and for the stuck function."""

    answers: int = 2000
    responses: int = 128
    rounds: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self, "answers", "responses", "rounds")


def sleeps(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """A slow reward function."""
    time.sleep(_SLEEP_S)
    return 1.0


def sticks(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """A reward function that never returns for one of the responses."""
    while solution_str == "0":
        pass
    return 1.0


def run(bench: ScoringBench) -> list[ResultRow]:
    """Measure; one row per kind of answer, one for the slow and one for the stuck function."""
    rows = []
    for source, (response, truth) in _ANSWERS.items():
        texts = [response(i) for i in range(bench.answers)]
        truths = [truth(i) for i in range(bench.answers)]
        samples = [_sample(i, source, truths[i]) for i in range(bench.answers)]
        manager = NaiveRewardManager(decode=_decode(texts))
        contenders = {
            ALONE: partial(_alone, source, texts, truths),
            source: partial(_through, manager, samples),
        }
        times = alternate(contenders, rounds=bench.rounds)
        rows.append(_row(bench, source, times))
    texts = [str(i) for i in range(bench.responses)]
    samples = [_sample(i, "x", None) for i in range(bench.responses)]
    slow = NaiveRewardManager(sleeps, decode=_decode(texts))
    stuck = PrimeRewardManager(sticks, decode=_decode(texts), timeout_s=_DEADLINE_S)
    once = alternate(
        {
            "sleeps": partial(_through, slow, samples),
            "sticks": partial(anyio.run, stuck.score_group, samples),
        },
        rounds=bench.rounds,
        warm_up=0,
    )
    return [*rows, *(_row(bench, name, {name: times}) for name, times in once.items())]


def missed(rows: Sequence[ResultRow]) -> list[str]:
    """The floors that were missed, in words."""
    wrong = []
    for row in rows:
        seconds = row.seconds.median
        if row.contender == "sleeps" and seconds >= SLOW_FLOOR:
            wrong.append(f"a function that sleeps {_SLEEP_S:g} s takes {seconds:.2f} s")
        elif row.contender == "sticks" and seconds >= _DEADLINE_S + STUCK_FLOOR:
            wrong.append(f"a function that gets stuck once takes {seconds:.2f} s")
        elif "answers_per_second" in row.values:
            rate = median_of(row.values["answers_per_second"])
            in_workers = worker_pool_of(row.contender) is not None
            floor = median_of(row.values["alone_per_second"]) if in_workers else RATE_FLOOR
            if rate < floor:
                wrong.append(f"{row.contender}: {rate:,.0f} answers per second, below {floor:,.0f}")
    return wrong


def _row(bench: ScoringBench, name: str, times: Mapping[str, Times]) -> ResultRow:
    values: dict[str, Any] = {"cpu_seconds": Spread.of(times[name].cpu)}
    if ALONE in times:
        rates = {key: [bench.answers / s for s in of.wall] for key, of in times.items()}
        values |= {
            "answers_per_second": Spread.of(rates[name]),
            "alone_per_second": Spread.of(rates[ALONE]),
        }
    return ResultRow(
        benchmark="scoring",
        case=f"{bench.answers} answers, {bench.responses} responses",
        contender=name,
        dtype="none",
        threads=1,
        seconds=Spread.of(times[name].wall),
        machine=this_machine(),
        values=values,
        settings={"answers": bench.answers, "rounds": bench.rounds},
    )


def _sample(index: int, source: str, truth: Any) -> Sample:
    return Sample(
        uid=str(index),
        segments=[Segment.given("prompt", [0]), Segment.given("assistant", [index])],
        data_source=source,
        ground_truth=truth,
        status=Status.COMPLETED,
    )


def _decode(texts: Sequence[str]) -> Callable[[list[int]], str]:
    return lambda ids: texts[ids[0]]


def _alone(source: str, texts: Sequence[str], truths: Sequence[Any]) -> None:
    if worker_pool_of(source) is not None:
        for text, truth in zip(texts, truths, strict=True):
            math_verified.same_value(_begin, rf"\boxed{{{last_boxed(text)}}}", truth)
        return
    for text, truth in zip(texts, truths, strict=True):
        default_compute_score(source, text, truth, {})


def _begin() -> None:
    """Do nothing: no process waits for this signal."""


def _through(manager: RewardManager, samples: Sequence[Sample]) -> None:
    scores = anyio.run(manager.score_group, samples)
    wrong = [score for score in scores if score.value != 1.0]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(scores)} answers scored as wrong: {wrong[0]}")
