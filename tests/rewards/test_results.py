"""Results and errors of reward functions that fight back: every one is a failure with a reason."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from slipstream.errors import MAX_REASON, RewardError
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import Score, apply_score
from slipstream.rewards.results import MAX_PARTS, MAX_SCORE, Reader, outcome_of, read_result
from slipstream.types import Status
from tests.rewards.helpers import decode, sample


class Boom(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


ERRORS = [ValueError, Boom, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


def fails(*names: str, error: type[BaseException], base: type = object) -> Any:
    """Return an instance of a subclass of `base` whose methods `names` raise `error`."""

    def method(self: Any, *args: Any) -> Any:
        raise error("no")

    made = {n: property(method) if n in ("ndim", "__class__") else method for n in names}
    kind = type("Fails", (base,), made)
    if issubclass(base, list):
        return kind([1.0, 1.0])
    if issubclass(base, float):
        return kind(1.0)
    return kind(score=1.0) if issubclass(base, dict) else kind()


class Zero:
    ndim = 0


BROKEN: list[tuple[type, tuple[str, ...]]] = [
    (object, ("ndim",)),
    (object, ("__class__",)),
    (object, ("__getattribute__",)),
    (Zero, ("item",)),
    (float, ("__float__",)),
    (float, ("ndim",)),
    (dict, ("__getitem__",)),
    (dict, ("__contains__",)),
    (dict, ("items",)),
    (dict, ("get",)),
]
BROKEN_LISTS: list[tuple[type, tuple[str, ...]]] = [
    (object, ("tolist",)),
    (list, ("__len__",)),
    (list, ("__iter__",)),
    (object, ("__getattribute__",)),
    (dict, ("keys", "__iter__", "__len__")),
]


def scored(function: Callable[..., Any], **options: Any) -> Score:
    manager = NaiveRewardManager(function, decode=decode, timeout_s=options.pop("timeout_s", 20.0))
    return anyio.run(manager.score_sample, sample(1))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("base", "names"), BROKEN)
def test_a_result_that_raises_is_a_failure_with_the_reason(
    base: type, names: tuple[str, ...], error: type[BaseException]
) -> None:
    def returns(**_: Any) -> Any:
        return fails(*names, base=base, error=error)

    async def later(**_: Any) -> Any:
        return returns()

    for function in (returns, later):
        assert scored(function) == Score(0.0, failure=f"{error.__name__}: no")


@pytest.mark.parametrize("error", [ValueError, Boom, asyncio.CancelledError])
@pytest.mark.parametrize(("base", "names"), BROKEN_LISTS)
def test_a_list_of_results_that_raises_fails_all_its_responses(
    base: type, names: tuple[str, ...], error: type[BaseException]
) -> None:
    def returns(solution_strs: list[str], **_: Any) -> Any:
        return fails(*names, base=base, error=error)

    manager = BatchRewardManager(returns, decode=decode, timeout_s=20.0)
    scores = anyio.run(manager.score_group, [sample(1), sample(2)])
    reason = f"{error.__name__}: no"
    if base is dict:
        reason = "returned Fails, not a list of rewards"
    assert scores == [Score(0.0, failure=reason)] * 2


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_function_raises_is_a_failure(error: type[BaseException]) -> None:
    def now(**_: Any) -> float:
        raise error("no")

    async def later(**_: Any) -> float:
        raise error("no")

    async def in_a_task_of_its_own(**_: Any) -> float:
        return await asyncio.create_task(later())

    for function in (now, later, in_a_task_of_its_own):
        assert scored(function) == Score(0.0, failure=f"{error.__name__}: no")


def test_the_error_itself_may_be_broken() -> None:
    class BrokenError(Exception):
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise ValueError("no class")

        def __str__(self) -> str:
            raise Boom

    def function(**_: Any) -> float:
        raise BrokenError

    assert scored(function) == Score(0.0, failure="BrokenError")


def test_a_result_that_hangs_exceeds_the_deadline() -> None:
    over = threading.Event()

    class Hangs(float):
        def __float__(self) -> float:
            over.wait(60)
            return 1.0

    async def later(**_: Any) -> float:
        return Hangs()

    for function in (lambda **_: Hangs(), later):
        assert scored(function, timeout_s=0.1).failure == "no answer within 0.1 s"
    over.set()


def test_reasons_and_answers_have_a_bounded_length() -> None:
    def raises(**_: Any) -> float:
        raise ValueError("x" * 50_000_000)

    failure = scored(raises).failure
    assert failure is not None
    assert len(failure) == MAX_REASON
    assert failure.startswith("ValueError: xxx")
    answer = scored(lambda **_: {"score": 0.5, "pred": "y" * 50_000_000}).answer
    assert answer is not None
    assert len(answer) == MAX_REASON
    assert answer.endswith("y... (50,000,000 characters)")
    # A user's own manager passes through `apply_score` only.
    one = sample(1)
    apply_score(one, Score(0.0, ok=False, failure="z" * 50_000_000))
    assert (one.status, len(one.failure or "")) == (Status.FAILED, MAX_REASON)
    with pytest.raises(RewardError) as error:
        Reader().outcome(_raise(RewardError("w" * 50_000_000))).each(1)
    assert len(str(error.value)) <= MAX_REASON


def _raise(error: BaseException) -> Callable[[], Any]:
    def raises() -> Any:
        raise error

    return raises


def test_texts_can_be_stored_by_every_file() -> None:
    read = read_result({"score": 1, "pred": "a\ud800b"})
    assert isinstance(read, Score)
    assert read.answer == "a\\ud800b"
    long = read_result({"score": 1, "pred": 10**6_000})
    assert isinstance(long, Score)
    assert str(long.answer).startswith("0x")


def test_keys_of_any_type_become_names_of_parts() -> None:
    read = read_result({"score": 1, 1: 2.0, None: 3.0, ("a", 1): 4.0, "k" * 10_000: 5.0})
    assert isinstance(read, Score)
    *short, long = read.parts
    assert short == ["1", "None", "('a', 1)"]
    assert len(long) == 200
    assert list(read.parts.values()) == [2.0, 3.0, 4.0, 5.0]
    many = read_result({"score": 1, **{str(i): 1.0 for i in range(MAX_PARTS)}})
    assert many == f"returned a mapping with more than {MAX_PARTS:,} entries"


def test_own_scores_are_checked_like_numbers() -> None:
    odd: Any = {1: 2, "text": "x", "n": math.nan, "score": 0.5}
    assert read_result(Score(True, odd, answer=7)) == Score(  # type: ignore[arg-type]
        1.0, {"1": 2.0, "score": 0.5}, answer="7"
    )
    wrong: Any = "1"
    assert read_result(Score(wrong)) == "returned a score of str, not a finite number"


@pytest.mark.parametrize("value", [2 * MAX_SCORE, -1e308, {"score": 1e300}])
def test_scores_whose_squares_overflow_are_failures(value: Any) -> None:
    read = read_result(value)
    assert isinstance(read, str)
    assert "from -1e+15 to 1e+15" in read
    assert read_result({"score": 1.0, "huge": 1e300}) == Score(1.0)


def test_a_list_that_is_longer_than_it_says_is_a_failure() -> None:
    class Endless(list[float]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[float]:
            while True:
                yield 1.0

    def returns(completions: list[str], **_: Any) -> Any:
        return Endless()

    assert scored(returns).failure == "returned Endless whose length is wrong"


def test_ctrl_c_in_the_main_thread_is_not_a_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome_of(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        read_result(fails("__float__", base=float, error=KeyboardInterrupt))
