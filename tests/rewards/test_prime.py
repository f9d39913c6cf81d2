"""`PrimeRewardManager` scores in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.prime import PrimeRewardManager
from slipstream.rewards.protocol import Score
from tests.rewards.helpers import decode, sample

FUNCTIONS = """
import os, time

class Unreadable(float):
    def __float__(self):
        raise SystemExit("six")
    def __reduce__(self):
        raise ValueError("cannot be sent")

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "1":
        while True:
            pass
    if solution_str == "2":
        os._exit(3)
    if solution_str == "3":
        raise KeyError("three")
    if solution_str == "5":
        raise KeyboardInterrupt("five")
    if solution_str == "6":
        return Unreadable()
    if solution_str == "7":
        class Local(BaseException):
            pass
        raise Local("seven")
    if solution_str == "4":
        return "four"
    return {"score": bonus + len(solution_str), "process": os.getpid()}

def trl(completions, **kwargs):
    return [float(len(text)) for text in completions]

async def slow(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


def manager(function: Any, *, timeout_s: float = 20.0, workers: int = 1) -> PrimeRewardManager:
    return PrimeRewardManager(function, decode=decode, timeout_s=timeout_s, num_workers=workers)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_failure_affects_one_sample_only(file: Path) -> None:
    prime = manager(get_custom_reward_fn(file, reward_kwargs={"bonus": 0.5}), workers=2)

    async def scored() -> list[Score]:
        scores = await prime.score_group([sample(n) for n in (2, 3, 4, 55)])
        # The processes are running now, so the deadline covers only the function.
        prime._runner.timeout_s = 5.0
        return scores + await prime.score_group([sample(1), sample(666)])

    ended, raised, text, right, stuck, after = anyio.run(scored)
    assert ended.failure == "the scoring process ended"
    assert raised.failure == "KeyError: 'three'"
    assert text.failure == "returned str, not a number"
    assert (right.value, after.value) == (2.5, 3.5)
    assert stuck.failure == "no answer within 5 s"
    assert (prime.timeouts, prime.failures, prime.abandoned) == (1, 4, 0)


def test_what_a_process_raises_or_returns_is_read_there(file: Path) -> None:
    prime = manager(get_custom_reward_fn(file))
    scores = anyio.run(prime.score_group, [sample(n) for n in (5, 6, 7, 55)])
    assert [score.failure for score in scores] == [
        "KeyboardInterrupt: five",
        "SystemExit: six",
        "Local: seven",
        None,
    ]


def test_a_process_is_reused(file: Path) -> None:
    prime = manager(get_custom_reward_fn(file))

    async def scored() -> list[Score]:
        return [await prime.score_sample(sample(n)) for n in (55, 66)]

    one, two = anyio.run(scored)
    assert one.parts["process"] == two.parts["process"]


def test_built_in_and_trl_functions_work_in_processes(file: Path) -> None:
    assert anyio.run(manager(get_custom_reward_fn(file, "trl")).score_sample, sample(7)).value == 1
    built_in = PrimeRewardManager(decode=decode)
    assert anyio.run(built_in.score_sample, sample(1, 2)) == Score(1.0)
    with pytest.raises(RewardError, match="no built-in reward function for data_source 'x'"):
        anyio.run(built_in.score_sample, sample(1, source="x"))


def test_async_and_unpicklable_functions_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"is async; set .*=naive"):
        manager(get_custom_reward_fn(file, "slow"))
    with pytest.raises(ConfigError, match=r"set reward_model\.reward_manager=naive"):
        manager(lambda **_: 1.0)
