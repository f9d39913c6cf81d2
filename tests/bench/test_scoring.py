"""What the benchmark of scoring measures, and what it holds to be missed."""

from __future__ import annotations

from dataclasses import replace

from slipstream.bench.record import Spread
from slipstream.bench.scoring import ScoringBench, missed, run


def test_every_kind_of_answer_and_what_slow_functions_cost() -> None:
    rows = run(ScoringBench(answers=20, responses=6, rounds=1))
    assert [row.contender for row in rows] == [
        *("gsm8k", "lighteval/MATH", "math_dapo", "searchR1_nq", "exact_match"),
        *("sleeps", "sticks"),
    ]
    assert all("answers_per_second" in row.values for row in rows[:5])
    # What is at least so, whatever else the machine does.
    assert rows[5].seconds.median >= 1.0
    assert rows[6].seconds.median >= 2.0

    quick = {"answers_per_second": Spread.of([1e6])}
    good = [replace(row, values=quick, seconds=Spread.of([1.9])) for row in rows]
    assert missed(good) == []
    slow = {"answers_per_second": Spread.of([1999.0])}
    bad = [replace(row, values=slow, seconds=Spread.of([4.0])) for row in rows]
    assert missed(bad) == [
        *(f"{row.contender}: 1,999 answers a second" for row in rows[:5]),
        "a function that sleeps 1 s takes 4.00 s",
        "a function that is stuck once takes 4.00 s",
    ]
