"""Rate limits, tested with a fake clock."""

from __future__ import annotations

from heapq import heappop, heappush

import anyio
import pytest

from slipstream.errors import ConfigError
from slipstream.rewards.limited import LimitedRewardManager
from slipstream.rewards.limits import Limits, RateLimit
from tests.rewards.helpers import decode, sample


class Clock:
    """A fake clock that advances when all tasks wait. `starts` has the start times of requests."""

    def __init__(self) -> None:
        self.now = 100.0
        self.starts: list[float] = []
        self._asleep: list[tuple[float, int, anyio.Event]] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = anyio.Event()
        heappush(self._asleep, (self.now + seconds, id(woken), woken))
        await woken.wait()

    async def run_requests(
        self, limits: Limits, requests: int, tokens: float, took: float = 0
    ) -> None:
        async def one() -> None:
            async with limits.request(tokens):
                self.starts.append(self.now)
                if took:
                    await self.sleep(took)

        async with anyio.create_task_group() as group:
            for _ in range(requests):
                group.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            while self._asleep:
                self.now, _, woken = heappop(self._asleep)
                woken.set()
                await anyio.wait_all_tasks_blocked()


def most_in_a_minute(starts: list[float]) -> int:
    return max(sum(start <= t < start + 60 for t in starts) for start in starts)


@pytest.mark.parametrize(
    ("max_rpm", "max_tpm", "tokens", "allowed"),
    [
        (100, None, 1000, 100),
        (None, 100_000, 500, 200),
        (300, 100_000, 1000, 100),
        (50, 100_000, 1000, 50),
        (7, None, 1, 7),
    ],
)
def test_requests_reach_but_do_not_exceed_the_limits(
    max_rpm: float | None, max_tpm: float | None, tokens: float, allowed: int
) -> None:
    clock = Clock()
    limits = Limits(max_rpm=max_rpm, max_tpm=max_tpm, clock=clock.time, sleep=clock.sleep)
    anyio.run(clock.run_requests, limits, 3 * allowed, tokens)
    assert len(clock.starts) == 3 * allowed
    most = most_in_a_minute(clock.starts)
    assert most <= allowed * 1.02 + 1e-9
    assert most >= allowed * 0.98
    # Requests start in their order, evenly spaced.
    gaps = [b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False)]
    assert min(gaps) == pytest.approx(60 / allowed)
    assert max(gaps) == pytest.approx(60 / allowed)


def test_max_concurrent_limits_running_requests() -> None:
    clock = Clock()
    limits = Limits(max_concurrent=2, clock=clock.time, sleep=clock.sleep)
    anyio.run(clock.run_requests, limits, 6, 1.0, 10.0)
    assert clock.starts == [100, 100, 110, 110, 120, 120]


def test_unused_time_does_not_accumulate() -> None:
    clock = Clock()
    rate = RateLimit(60, clock.time)
    assert [rate.reserve(1) for _ in range(3)] == [0, 1, 2]
    clock.now += 50
    assert [rate.reserve(2) for _ in range(3)] == [0, 2, 4]


def test_the_manager_obeys_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = LimitedRewardManager(
        decode=decode, max_tpm=600_000, estimated_tokens_per_request=1000, max_concurrent=2
    )
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(manager.limits, "_sleep", sleep)
    scores = anyio.run(manager.score_group, [sample(1, 2), sample(1, 3), sample(1, 2)])
    assert [score.value for score in scores] == [1.0, 0.0, 1.0]
    # One call every 0.1 seconds, minus the duration of the earlier calls.
    assert len(waited) == 2
    assert 0 < waited[0] <= 0.1
    assert waited[0] < waited[1] <= 0.2


@pytest.mark.parametrize("limit", [{"max_rpm": 0}, {"max_tpm": -1}, {"max_concurrent": 0}])
def test_limits_of_zero_or_less_are_refused(limit: dict[str, int]) -> None:
    (name,) = limit
    with pytest.raises(ConfigError, match=rf"{name}=.* set a number above 0"):
        Limits(**limit)  # type: ignore[arg-type]
