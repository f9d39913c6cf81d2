"""The scoring benchmark: its rows, and which floors it reports as missed."""

from __future__ import annotations

from dataclasses import replace

from slipstream.bench.record import Spread
from slipstream.bench.scoring import ScoringBench, missed, run


def test_rows_cover_all_answers_and_slow_functions_and_missed_floors_are_named() -> None:
    rows = run(ScoringBench(answers=20, responses=6, rounds=1))
    assert [row.contender for row in rows] == [
        *("gsm8k", "lighteval/MATH", "math_dapo", "searchR1_nq", "exact_match"),
        *("math_verify", "numina_olympiads"),
        *("sleeps", "sticks"),
    ]
    assert all("answers_per_second" in row.values for row in rows[:7])
    # Lower bounds that hold on any machine.
    assert rows[7].seconds.median >= 1.0
    assert rows[8].seconds.median >= 2.0

    quick = {"answers_per_second": Spread.of([1e6]), "alone_per_second": Spread.of([1e6])}
    good = [replace(row, values=quick, seconds=Spread.of([1.9])) for row in rows]
    assert missed(good) == []
    slow = {"answers_per_second": Spread.of([1999.0]), "alone_per_second": Spread.of([2001.0])}
    bad = [replace(row, values=slow, seconds=Spread.of([4.0])) for row in rows]
    assert missed(bad) == [
        *(f"{row.contender}: 1,999 answers per second, below 2,000" for row in rows[:5]),
        *(f"{row.contender}: 1,999 answers per second, below 2,001" for row in rows[5:7]),
        "a function that sleeps 1 s takes 4.00 s",
        "a function that gets stuck once takes 4.00 s",
    ]
