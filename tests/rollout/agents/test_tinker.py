"""Environments written for tinker-cookbook run unchanged."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anyio
import pytest

from slipstream.errors import ConfigError
from slipstream.rollout.agents.tinker import TinkerEpisodes, is_tinker_environment
from slipstream.rollout.episode import CRASH, EpisodeLimits
from slipstream.types import Generation, PlacedReward, Prompt, Sample, Status, StopReason
from tests.rollout.agents.policy import Policy

ROW = Prompt(
    uid="q",
    ids=[1],
    messages=[{"role": "user", "content": "hi"}],
    extra_info={"size": 2},
    ground_truth="4",
)
ADDED = [50, 51]


@dataclass
class ModelInput:
    """An observation. As in tinker, `to_ints` gives all its tokens."""

    tokens: list[int]

    def to_ints(self) -> list[int]:
        return self.tokens


@dataclass
class StepResult:
    """The result of a step, with tinker's fields."""

    reward: float
    episode_done: bool
    next_observation: ModelInput
    next_stop_condition: list[int] | list[str]
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)


class Game:
    """`size` turns, with two tokens between them."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, size: int, ground_truth: str = "", mark: str = "") -> None:
        self.size, self.ground_truth, self.mark = size, ground_truth, mark
        self.tokens = [1, 2]
        self.stop: list[Any] = [9]

    async def initial_observation(self) -> Any:
        return ModelInput([*self.tokens]), self.stop

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        Game.seen.append((action, extra, self.mark))
        self.size -= 1
        self.tokens += [*action, *ADDED]
        return StepResult(
            reward=0.25 * len(Game.seen) if self.size else 1.0,
            episode_done=self.size == 0,
            next_observation=ModelInput([*self.tokens] if self.size else []),
            next_stop_condition=self.stop,
            metrics={"actions": len(action)},
        )


class Cut(Policy):
    """Its turn is cut off if only two tokens may follow."""

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        generation = await super().__call__(sample, max_tokens)
        if max_tokens == 2:
            generation.stop_reason = StopReason.LENGTH
        return generation


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Game.seen.clear()


def episodes(make: Callable[..., Any] = Game, clock: Any = None, **limits: Any) -> TinkerEpisodes:
    more = {} if clock is None else {"clock": clock}
    return TinkerEpisodes(
        make,
        EpisodeLimits(**({"max_tokens": 100} | limits)),
        kwargs={"mark": "m"},
        tokenizer="the tokenizer",
        ends={9, "<end>"},
        key="environment",
        **more,
    )


def new_sample() -> Sample:
    return Sample.from_prompt(ROW, group_index=0, index=0)


def run(runner: TinkerEpisodes, sample: Sample, policy: Policy, row: Prompt = ROW) -> bool:
    return anyio.run(lambda: runner.run(sample, row, policy, seed=1))


def test_observations_have_no_loss_and_rewards_fall_on_their_turn() -> None:
    sample = new_sample()
    assert run(episodes(scores_itself=True), sample, Policy())
    assert sample.prompt_ids == [1, 2]
    assert sample.response_ids == [10, 11, *ADDED, 20, 21]
    assert sample.loss_mask == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert [s.role for s in sample.segments] == ["prompt", "assistant", "tool", "assistant"]
    assert sample.status is Status.COMPLETED
    record = sample.episode
    assert record is not None
    assert record.rewards == [
        PlacedReward(3, "environment", 0.25),
        PlacedReward(7, "environment", 1.0),
    ]
    assert (record.turns, record.score, record.metrics) == (2, 0.0, {"actions": 4.0})
    stop = {"stop_reason": "stop"}
    assert Game.seen == [([10, 11], stop, "m"), ([20, 21], stop, "m")]


def test_with_a_reward_function_the_environment_sets_no_score() -> None:
    sample = new_sample()
    assert run(episodes(), sample, Policy())
    assert sample.episode is not None
    assert sample.episode.score is None


def test_a_function_may_make_the_environment() -> None:
    seen: list[Any] = []

    async def make(prompt: Any, tokenizer: Any, size: int, mark: str) -> Game:
        seen.extend([prompt, tokenizer, mark])
        return Game(size)

    sample = new_sample()
    assert run(episodes(make), sample, Policy())
    assert seen == [ROW.messages, "the tokenizer", "m"]
    assert len(Game.seen) == 2


def test_a_step_without_extra_gets_the_action_alone() -> None:
    class Old(Game):
        async def step(self, action: list[int]) -> StepResult:  # type: ignore[override]
            return await super().step(action)

    assert run(episodes(Old), new_sample(), Policy())
    assert [extra for _, extra, _ in Game.seen] == [None, None]


@pytest.mark.parametrize("stop_in", [0, 1])
def test_a_stopped_episode_is_replayed_to_a_new_environment(stop_in: int) -> None:
    class Fixed(Game):
        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            result = await super().step(action, extra=extra)
            result.reward = float(self.size)
            return result

    whole, sample = new_sample(), new_sample()
    run(episodes(Fixed), whole, Policy())
    policy = Policy(stop_in=stop_in)
    assert not run(episodes(Fixed), sample, policy)
    assert sample.status is Status.PENDING
    policy.limits.clear()
    assert run(episodes(Fixed), copy.deepcopy(sample), copy.deepcopy(policy))
    assert run(episodes(Fixed), sample, policy)
    assert sample == whole
    assert len(policy.limits) == 2 - stop_in  # recorded turns are not generated again


@pytest.mark.parametrize(
    ("what", "words"),
    [("prompt", "began with another prompt"), ("answer", "otherwise"), ("end", "ended earlier")],
)
def test_another_answer_in_the_replay_fails_the_sample(what: str, words: str) -> None:
    made: list[Game] = []

    class Changes(Game):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            made.append(self)
            if len(made) == 2 and what == "prompt":
                self.tokens[0] = 7

        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            result = await super().step(action, extra=extra)
            if len(made) == 2 and what == "answer":
                result.next_observation.tokens[-1] = 7
            if len(made) == 2 and what == "end":
                result.episode_done = True
            return result

    def make(size: int, mark: str) -> Game:
        return Changes(size)

    sample, policy = new_sample(), Policy(stop_in=1)
    assert not run(episodes(make), sample, policy)
    assert not run(episodes(make), sample, policy)
    assert sample.status is Status.FAILED
    assert words in (sample.failure or "")


def test_a_replay_does_not_use_up_the_budget_of_seconds() -> None:
    seconds = iter(range(99))
    runner = episodes(clock=lambda: float(next(seconds)))
    sample, policy = new_sample(), Policy(stop_in=1)
    assert not run(runner, sample, policy)
    assert sample.episode is not None
    assert sample.episode.tool_seconds == 3.0  # the constructor, the prompt and a step
    assert run(runner, sample, policy)
    assert sample.episode.tool_seconds == 4.0


@pytest.mark.parametrize(
    ("limits", "budget", "turns"),
    [
        ({"max_assistant_turns": 2}, "assistant_turns", 2),
        ({"max_user_turns": 2}, "user_turns", 3),
        ({"max_tool_seconds": 2.5}, "tool_seconds", 1),
        ({"max_tokens": 4}, "tokens", 1),
        ({"max_tokens": 6}, "tokens", 2),
    ],
)
def test_a_budget_that_is_used_up_truncates_the_episode(
    limits: dict[str, Any], budget: str, turns: int
) -> None:
    seconds = iter(range(99))
    row, sample = Prompt(uid="q", ids=[1], extra_info={"size": 9}), new_sample()
    clock = (lambda: float(next(seconds))) if budget == "tool_seconds" else None
    assert run(episodes(clock=clock, **limits), sample, Cut(), row)
    assert sample.status is Status.TRUNCATED
    assert sample.episode is not None
    assert (sample.episode.truncated_by, sample.episode.turns) == (budget, turns)
    assert len(Game.seen) == turns  # the environment gives a reward for a turn that was cut
    expected = "length" if limits == {"max_tokens": 6} else "stop"
    assert Game.seen[-1][1] == {"stop_reason": expected}


def test_a_turn_that_is_cut_off_stays_truncated_if_the_environment_ends() -> None:
    row, sample = Prompt(uid="q", ids=[1], extra_info={"size": 1}), new_sample()
    assert run(episodes(max_tokens=2), sample, Cut(), row)
    assert sample.status is Status.TRUNCATED
    assert sample.episode is not None
    assert sample.episode.rewards == [PlacedReward(3, "environment", 1.0)]


def test_a_crash_ends_the_episode_and_is_scored() -> None:
    class Crashes(Game):
        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            raise ValueError("broken")

    sample = new_sample()
    assert run(episodes(Crashes), sample, Policy())
    assert sample.episode is not None
    assert sample.status is Status.TRUNCATED
    assert (sample.episode.truncated_by, sample.episode.problems) == (CRASH, {"raised": 1})


class Overflow:
    """tinker's result for a prompt that is too long."""

    reward = -0.1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("constructor", "no table"),
        ("overflow", "initial_observation returned Overflow"),
        ("rewrites", "the environment must append"),
        ("nan", "the reward 'environment' of turn 1 is nan"),
    ],
)
def test_an_environment_that_goes_wrong_fails_its_sample(how: str, words: str) -> None:
    class Bad(Game):
        def __init__(self, size: int, mark: str) -> None:
            super().__init__(size)
            if how == "constructor":
                raise OSError("no table")

        async def initial_observation(self) -> Any:
            return Overflow() if how == "overflow" else await super().initial_observation()

        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            result = await super().step(action, extra=extra)
            if how == "rewrites":
                result.next_observation = ModelInput([1, 2, *ADDED])
            result.reward = float("nan") if how == "nan" else 0.0
            return result

    sample = new_sample()
    assert not run(episodes(Bad), sample, Policy())
    assert sample.status is Status.FAILED
    assert words in (sample.failure or "")


def test_a_failed_engine_fails_the_sample() -> None:
    sample = new_sample()
    assert not run(episodes(), sample, Policy(fail=True))
    assert "no memory" in (sample.failure or "")


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ([9], None),
        (["<end>"], None),
        ("<end>", None),
        ([], None),
        ([9, 8], r"at 8, .*rollout\.stop_token_ids"),
        (["</search>"], r"</search>.*rollout\.stop$"),
    ],
)
def test_turns_end_where_the_engine_ends_them(stop: Any, words: str | None) -> None:
    class Stops(Game):
        def __init__(self, size: int, mark: str) -> None:
            super().__init__(size)
            self.stop = stop

    if words is None:
        assert run(episodes(Stops), new_sample(), Policy())
        return
    with pytest.raises(ConfigError, match=words):
        run(episodes(Stops), new_sample(), Policy())


def test_what_makes_no_environment_is_refused() -> None:
    def nothing(mark: str) -> int:
        return 1

    with pytest.raises(ConfigError, match="'initial_observation'"):
        run(episodes(nothing), new_sample(), Policy())
    other = Prompt(uid="q", ids=[1])
    with pytest.raises(ConfigError, match=r"'size'.*environment\.kwargs"):
        run(episodes(), new_sample(), Policy(), other)


def test_an_environment_is_recognized_by_its_methods() -> None:
    class Half:
        async def step(self, action: Any) -> Any: ...

    assert is_tinker_environment(Game)
    assert is_tinker_environment(lambda: Game(1))
    assert not is_tinker_environment(Half)
    assert not is_tinker_environment(Game(1))


def test_a_cancelled_episode_ends() -> None:
    class Waits(Game):
        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            await asyncio.sleep(100)
            raise AssertionError

    async def work() -> None:
        with anyio.move_on_after(0.01) as scope:
            await episodes(Waits).run(new_sample(), ROW, Policy(), seed=1)
        assert scope.cancelled_caught

    anyio.run(work)
