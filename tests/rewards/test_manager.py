"""Reward managers score samples and handle failing reward functions."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from slipstream.errors import RewardError
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.manager import (
    DAPORewardManager,
    NaiveRewardManager,
    compute_reward,
    read_result,
)
from slipstream.rewards.protocol import OnFailure, Score, apply_score
from slipstream.rewards.sandbox.protocol import Program, ProgramResult
from slipstream.types import Sample, Status
from tests.rewards.helpers import decode, sample


def managed(
    function: Callable[..., Any], *, timeout_s: float = 5.0, on_failure: OnFailure = "zero"
) -> NaiveRewardManager:
    return NaiveRewardManager(
        function, decode=decode, timeout_s=timeout_s, on_failure=on_failure, num_workers=2
    )


def score(manager: NaiveRewardManager, one: Sample | None = None) -> Score:
    return anyio.run(manager.score_sample, one or sample(1, 2))


def test_the_function_is_called_with_verls_arguments() -> None:
    seen: dict[str, Any] = {}

    def function(**kwargs: Any) -> float:
        seen.update(kwargs)
        return 0.5

    assert score(managed(function)) == Score(0.5)
    assert seen == {
        "data_source": "exact_match",
        "solution_str": "1 2",
        "ground_truth": "1 2",
        "extra_info": {"index": 4, "num_turns": 1},
    }


def test_built_in_functions_score_a_group_in_order() -> None:
    manager = NaiveRewardManager(decode=decode, num_workers=3)
    group = [sample(1, 2), sample(1), sample(1, 2), *(sample(3) for _ in range(7))]
    scores = anyio.run(manager.score_group, group)
    assert [s.value for s in scores] == [1.0, 0.0, 1.0, *[0.0] * 7]
    assert manager.failures == 0
    assert [s.reward for s in group] == [0.0] * 10
    assert anyio.run(manager.score_group, []) == []


def test_async_functions_are_awaited() -> None:
    async def function(solution_str: str, scale: float, **_: Any) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"score": scale * len(solution_str), "n": 1}

    class AsyncObject:
        async def __call__(self, **_: Any) -> int:
            return 2

    assert score(managed(functools.partial(function, scale=2.0))) == Score(6.0, {"n": 1.0})
    assert score(managed(AsyncObject())) == Score(2.0)


def test_a_reward_object_gets_the_whole_sample() -> None:
    class Length:
        def score(self, sample: Sample) -> Score:
            return Score(float(sample.response_length), {"length": 2.0})

    class Refuses:
        def score(self, sample: Sample) -> Score:
            return Score(0.0, ok=False, failure="no judge")

    length = NaiveRewardManager(Length(), decode=decode)
    assert score(length) == Score(2.0, {"length": 2.0})
    refuses = NaiveRewardManager(Refuses(), decode=decode, on_failure="drop")
    assert score(refuses) == Score(0.0, ok=False, failure="no judge")


def raises(**_: Any) -> float:
    raise ValueError("bad text")


async def raises_later(**_: Any) -> float:
    raise KeyError


def exits(**_: Any) -> float:
    sys.exit(3)


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


def raises_unprintable(**_: Any) -> float:
    raise MuteError


async def never(**_: Any) -> float:
    await anyio.sleep_forever()
    return 1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "ValueError: bad text"),
        (raises_later, "KeyError"),
        (exits, "SystemExit: 3"),
        (raises_unprintable, "MuteError"),
        (lambda **_: None, "returned NoneType, not a number"),
        (lambda **_: "1.0", "returned str, not a number"),
        (lambda **_: math.nan, "returned nan, not a finite number"),
        (lambda **_: {"score": -math.inf}, "returned -inf, not a finite number"),
        (lambda **_: 10**400, "returned inf, not a finite number"),
        (lambda **_: {"acc": 1}, r"returned a mapping without 'score' (keys: acc)"),
        (lambda **_: [1.0], "returned list, not a number"),
        (lambda **_: never(), "returned a coroutine: define the function with async def, so that"),
    ],
)
def test_failing_functions_give_failures_with_reasons(
    function: Callable[..., Any], reason: str
) -> None:
    zero = managed(function)
    result = score(zero)
    assert result.failure is not None
    assert result.failure.startswith(reason)
    assert (result.value, result.ok) == (0.0, True)
    assert zero.failures == 1
    dropped = score(managed(function, on_failure="drop"))
    assert (dropped.value, dropped.ok) == (0.0, False)
    with pytest.raises(RewardError, match=r"failed on sample 'u1' \(data_source 'exact_match'\)"):
        score(managed(function, on_failure="stop"))


def test_a_hung_call_is_abandoned() -> None:
    release = threading.Event()

    def hangs(solution_str: str, **_: Any) -> float:
        if solution_str == "0":
            release.wait(60)
        return 1.0

    before = set(threading.enumerate())  # other tests may have left hung threads
    manager = managed(hangs, timeout_s=0.05)
    # Three calls hang with two workers; after the deadline their slots are free again.
    scores = anyio.run(manager.score_group, [sample(0), sample(0), sample(0), sample(5)])
    assert [s.failure for s in scores[:3]] == ["no answer within 0.05 s"] * 3
    assert scores[3] == Score(1.0)
    assert (manager.timeouts, manager.failures, manager.abandoned) == (3, 3, 3)
    threads = [t for t in set(threading.enumerate()) - before if t.name == "reward"]
    assert len(threads) == 4  # one of them is idle
    assert all(t.daemon for t in threads)
    release.set()
    deadline = time.monotonic() + 10
    while manager.abandoned and time.monotonic() < deadline:
        time.sleep(0.001)
    assert manager.abandoned == 0


def test_too_many_hung_calls_raise_with_the_functions_name() -> None:
    release = threading.Event()

    def hangs(**_: Any) -> float:
        release.wait(60)
        return 1.0

    manager = managed(hangs, timeout_s=0.01)
    try:
        with pytest.raises(
            RewardError,
            match=r"calls of the reward function .*hangs .*raise reward_model\.timeout_s",
        ):
            anyio.run(manager.score_group, [sample(0) for _ in range(20)])
    finally:
        release.set()


def test_an_async_function_is_cancelled_at_the_deadline() -> None:
    result = score(managed(never, timeout_s=0.02))
    assert result.failure == "no answer within 0.02 s"


def test_a_hung_call_does_not_block_the_exit_of_the_interpreter() -> None:
    code = """
import anyio, threading
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.types import Sample
def hangs(**_):
    threading.Event().wait()
m = NaiveRewardManager(hangs, decode=str, timeout_s=0.05)
print(anyio.run(m.score_sample, Sample()).failure)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "no answer within 0.05 s"


def test_cancelling_the_caller_is_not_a_failure() -> None:
    release = threading.Event()

    def waits(**_: Any) -> float:
        release.wait(60)
        return 1.0

    manager = managed(waits)

    async def main() -> None:
        with anyio.move_on_after(0.02):
            await manager.score_sample(sample(1))

    anyio.run(main)
    release.set()
    assert (manager.failures, manager.timeouts) == (0, 0)


def test_an_unknown_data_source_raises_under_every_policy() -> None:
    manager = NaiveRewardManager(decode=decode, on_failure="zero")
    with pytest.raises(RewardError, match="no built-in reward function for data_source 'mystery'"):
        anyio.run(manager.score_group, [sample(1, source="mystery"), sample(1)])


def test_a_manager_works_in_successive_event_loops() -> None:
    manager = managed(lambda **_: 1)
    assert [score(manager).value for _ in range(3)] == [1.0, 1.0, 1.0]


def test_read_result_accepts_numbers_and_mappings() -> None:
    assert read_result(True) == Score(1.0)
    assert read_result(np.float32(0.5)) == Score(0.5)
    assert read_result(np.array(2)) == Score(2.0)
    assert read_result(np.array([2.0])) == "returned ndarray, not a number"
    assert read_result({"score": 1, "acc": True, "pred": "x", "bad": math.nan, "len": 3}) == Score(
        1.0, {"acc": 1.0, "len": 3.0}, answer="x"
    )
    assert read_result(Score(math.nan)) == "returned a score of nan, not a finite number"


def test_apply_score_sets_fields_that_compute_reward_reads() -> None:
    scored = sample(1)
    with pytest.raises(RewardError, match="sample 'u1' has no reward"):
        compute_reward(scored)
    apply_score(scored, Score(0.25, {"acc": 1.0}))
    assert (scored.reward, scored.reward_parts) == (0.25, {"acc": 1.0, "score": 0.25})
    assert compute_reward(scored) == 0.25
    zeroed = sample(1)
    apply_score(zeroed, Score(0.0, failure="ValueError: x"))
    assert zeroed.status is Status.COMPLETED
    assert zeroed.metadata == {"reward_failure": "ValueError: x"}
    dropped = sample(1)
    apply_score(dropped, Score(0.0, ok=False, failure="ValueError: x"))
    assert (dropped.status, dropped.failure) == (Status.FAILED, "ValueError: x")
    for correct in (True, False):
        graded = Sample(metadata={"correct": correct})
        assert compute_reward(graded) == float(correct)


def test_dapo_penalizes_tokens_in_the_buffer() -> None:
    def manager(**config: Any) -> DAPORewardManager:
        return DAPORewardManager(
            lambda **_: 1.0,
            decode=decode,
            max_resp_len=10,
            overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 0.5, **config},
        )

    values = {n: score(manager(), sample(*range(n))).value for n in (1, 6, 7, 8, 10)}
    assert values == {1: 1.0, 6: 1.0, 7: 0.875, 8: 0.75, 10: 0.5}
    logged = score(manager(log=True), sample(*range(8)))
    assert logged == Score(0.75, {"acc": 1.0, "overlong": 1.0, "overlong_reward": -0.25})
    # A plain number becomes the part `acc` before penalties; existing parts are unchanged.
    assert score(manager(enable=False), sample(*range(10))) == Score(1.0, {"acc": 1.0})
    parts = DAPORewardManager(lambda **_: {"score": 1.0, "format": 0.5}, decode=decode)
    assert score(parts, sample(1)) == Score(1.0, {"format": 0.5})


def test_concurrent_programs_are_limited_by_the_sandbox() -> None:
    """More concurrent programs would exceed their time limits."""
    inside, most, lock = 0, 0, threading.Lock()

    class Counting:
        def __init__(self, at_once: int, together: int) -> None:
            self.at_once, self.together = at_once, threading.Barrier(together)

        def knows(self, language: str) -> bool:
            return True

        def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            self.together.wait(20)
            with lock:
                inside -= 1
            yield from (ProgramResult("ok", "1") for _ in stdins)

        def converse(
            self, program: Program, judge_from: Callable[[int], Program], count: int
        ) -> Iterator[ProgramResult]:
            raise NotImplementedError

    def together(sandbox: Counting) -> int:
        nonlocal most
        most = 0
        function = partial(default_compute_score, sandbox=sandbox)
        manager = NaiveRewardManager(function, decode=lambda ids: "```python\nprint(1)\n```")
        truth = {"inputs": [""], "outputs": ["1"]}
        samples = [sample(1, source="apps", truth=truth) for _ in range(30)]
        scores = anyio.run(manager.score_group, samples)
        assert {score.value for score in scores} == {1.0}
        return most

    # Each program ends only when the given number of them has started.
    assert together(Counting(2, 2)) == 2
    assert together(Counting(30, 3)) >= 3
