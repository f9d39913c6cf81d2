"""Countdown problems, prompts and demonstrations are deterministic, disjoint and correct."""

from __future__ import annotations

import statistics
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.countdown import SPLITS, CountdownTask, Problem, Split, split_of
from slipstream.errors import ConfigError

TASK = CountdownTask(seed=0)

TOKENS_PER_TRY = 8
"""`a op b = c off d`, and the comma between two tries."""


def tokens(text: str) -> int:
    return len(text.split())


def test_prompt_has_the_documented_form() -> None:
    prompt = TASK.prompt("train", 0)
    *numbers, target, colon = str(prompt.messages[0]["content"]).split()  # type: ignore[index]
    assert colon == ":"
    goal = int(target.removeprefix("->"))
    assert prompt.ground_truth == {"numbers": [int(n) for n in numbers], "target": goal}
    # Number n has id n, target n has id 100 + n, and ":" is the last symbol.
    assert prompt.ids == [*map(int, numbers), 100 + goal, 206]
    assert prompt.uid == "countdown/0/train/0"
    assert prompt.data_source == "countdown"
    assert prompt.extra_info == {"split": "train", "index": 0}


def test_problems_follow_the_rules() -> None:
    sizes = set()
    for index in range(500):
        problem = TASK.problem("train", index)
        numbers = problem.numbers
        sizes.add(len(numbers))
        assert len(set(numbers)) == len(numbers)
        assert all(1 <= n <= 12 for n in numbers)
        assert 1 <= problem.target <= 99
        assert problem.target not in numbers
        assert any(problem.target in (a + b, a - b) for a in numbers for b in numbers if a != b)
    assert sizes == {3, 4, 5}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**9), other=st.integers(0, 10**9), start=st.integers(0, 10**6))
def test_train_and_held_out_never_overlap(seed: int, other: int, start: int) -> None:
    train, held_out = CountdownTask(seed), CountdownTask(other)
    seen = {train.problem("train", i).canonical for i in range(start, start + 100)}
    assert seen.isdisjoint(held_out.problem("held_out", i).canonical for i in range(100))


def test_splits_are_disjoint_and_have_many_problems() -> None:
    seen: dict[Split, set[str]] = {
        split: {TASK.problem(split, i).canonical for i in range(1500)} for split in SPLITS
    }
    assert seen["train"].isdisjoint(seen["held_out"])
    assert len(seen["train"]) > 1200
    # Held-out problems are distinct.
    assert len(seen["held_out"]) == 1500


def test_the_split_ignores_the_order_of_the_numbers() -> None:
    problem = Problem((8, 15, 6, 10), 25)
    assert problem.canonical == "6 8 10 15 -> 25"
    assert problem.text == "8 15 6 10 ->25 :"
    for fraction in (0.1, 0.5, 0.9):
        assert split_of(problem, fraction) == split_of(Problem((15, 10, 8, 6), 25), fraction)
    shares = [
        split_of(Problem((a, b, 15), a + b), 0.1) == "held_out"
        for a in range(1, 60)
        for b in range(a + 1, 60)
    ]
    assert abs(statistics.fmean(shares) - 0.1) < 0.03


def test_prompts_and_demonstrations_depend_on_seed_split_and_index() -> None:
    again = CountdownTask(seed=0)
    backwards = [again.prompt("train", i).ids for i in reversed(range(20))]
    assert [TASK.prompt("train", i).ids for i in range(20)] == backwards[::-1]
    assert TASK.demonstration("train", 5) == again.demonstration("train", 5)
    others = [CountdownTask(seed=1).prompt("train", i).ids for i in range(20)]
    assert others != backwards[::-1]
    variants = {TASK.demonstration("train", 3, variant=v)[1]["content"] for v in range(20)}
    assert len(variants) > 5


def test_the_first_problems_do_not_change() -> None:
    """A changed distribution would silently change every recorded run."""
    assert TASK.problem("train", 0) == Problem((5, 11, 8, 9), 14)
    assert TASK.problem("held_out", 0) == Problem((5, 3, 11), 2)
    assert TASK.demonstration("train", 0)[1]["content"] == (
        "11 - 9 = 2 off 12 , 11 - 5 = 6 off 8 , 8 - 5 = 3 off 11 , 11 + 9 = 20 off 6 , "
        "5 + 11 = 16 off 2 , 9 - 8 = 1 off 13 answer 9 - 8"
    )


def test_demonstrations_have_correct_steps_without_repetition() -> None:
    for index in range(300):
        problem = TASK.problem("train", index)
        text = TASK.demonstration("train", index)[1]["content"]
        body, _, answer = text.partition(" answer ")
        steps = [s.split() for s in body.split(",")]
        for left, sign, right, equals, value, word, distance in steps:
            assert (equals, word) == ("=", "off")
            assert int(distance) == abs(problem.target - int(value))
            a, b = int(left), int(right)
            assert {a, b} <= set(problem.numbers)
            assert a != b
            assert int(value) == (a + b if sign == "+" else a - b)
            assert int(value) > 0
        assert len({tuple(step[:3]) for step in steps}) == len(steps)
        hits = [int(step[4]) == problem.target for step in steps]
        assert not any(hits[:-1])
        assert answer.split() == steps[-1][:3]
        assert hits[-1] == TASK.verify(problem, text).correct
        assert tokens(text) + 1 <= 20 * TOKENS_PER_TRY + 4


def share_solved(task: CountdownTask, count: int) -> float:
    """How many of the first `count` demonstrations are correct."""
    return statistics.fmean(
        task.verify(task.problem("train", i), task.demonstration("train", i)[1]["content"]).correct
        for i in range(count)
    )


def test_a_demonstration_gives_up_with_the_probability_set() -> None:
    task = CountdownTask(give_up=0.5, min_numbers=3, max_numbers=3)
    count = 3000
    # Six tries in random order; the first of the s that solve is try k with probability
    # C(6 - k, s - 1) / C(6, s), and is reached with probability 0.5^(k-1).
    expected = 0.0
    for index in range(count):
        problem = task.problem("train", index)
        values = [a + b for a, b in combinations(problem.numbers, 2)]
        values += [abs(a - b) for a, b in combinations(problem.numbers, 2)]
        s = values.count(problem.target)
        expected += sum(comb(6 - k, s - 1) * 0.5 ** (k - 1) for k in range(1, 8 - s)) / comb(6, s)
    # The standard error is 0.009.
    assert share_solved(task, count) == pytest.approx(expected / count, abs=0.03)


def test_imitation_is_capped_and_searching_longer_helps() -> None:
    assert 0.55 < share_solved(TASK, 1000) < 0.7
    assert share_solved(CountdownTask(give_up=0.0), 200) == 1.0
    solved = [share_solved(CountdownTask(max_tries=k), 400) for k in (1, 4, 12, 20)]
    assert solved == sorted(solved)
    assert solved[-1] > solved[0] + 0.3


def test_lengths_have_a_long_tail() -> None:
    lengths = sorted(tokens(TASK.demonstration("train", i)[1]["content"]) + 1 for i in range(2000))
    assert lengths[-1] / statistics.median(lengths) > 4.0
    # Five numbers make ten pairs, and twenty tries.
    assert lengths[-1] <= 20 * TOKENS_PER_TRY + 4


def test_max_tries_limits_the_response_length() -> None:
    task = CountdownTask(max_tries=2, give_up=0.0)
    lengths = {tokens(task.demonstration("train", index)[1]["content"]) + 1 for index in range(50)}
    assert lengths == {TOKENS_PER_TRY + 4, 2 * TOKENS_PER_TRY + 4}


def test_max_prompt_tokens_is_reached() -> None:
    assert max(len(TASK.prompt("train", i).ids) for i in range(100)) == TASK.max_prompt_tokens()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_numbers": 2}, "min_numbers 2"),
        ({"min_numbers": 5, "max_numbers": 4}, "max_numbers 4"),
        ({"max_number": 60}, "at most 49"),
        ({"max_number": 5}, "max_number 5"),
        ({"give_up": 1.0}, "give_up 1.0"),
        ({"max_tries": 0}, "max_tries 0"),
        ({"holdout_fraction": 0.0}, "holdout_fraction 0.0"),
    ],
)
def test_impossible_parameters_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CountdownTask(**options)  # type: ignore[arg-type]


def test_unknown_splits_and_negative_indices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown split 'test'; .*train, held_out"):
        TASK.problem("test", 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="index -1"):
        TASK.prompt("train", -1)
