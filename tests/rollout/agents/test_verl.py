"""Agent loops written for VERL run unchanged, but for their imports."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from typing import Any, ClassVar

import anyio
import pytest

from slipstream.compat.verl.experimental.agent_loop import register
from slipstream.compat.verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.agents import verl as module
from slipstream.rollout.agents.verl import AgentLoops, registered_loops
from slipstream.rollout.episode import SingleTurn
from slipstream.types import Prompt, Sample, Status
from tests.rollout.agents.policy import Policy

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
ROW = Prompt(
    uid="q",
    ids=[1],
    messages=[{"role": "user", "content": "hi"}],
    extra_info={"index": 3, "agent_name": "two_turns"},
    ground_truth="4",
)
ADDED = [50, 51]


class TwoTurns(AgentLoopBase):
    """A turn, two tokens from outside, and another turn."""

    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, mark: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mark = mark

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        TwoTurns.seen = {**row, "mark": self.mark, "config": self.config}
        prompt, ids, mask = [1, 2], list[int](), list[int]()
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id="same", prompt_ids=prompt + ids, sampling_params=sampling_params
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            assert output.log_probs == [-1.0] * len(output.token_ids)
            if turn == 0:
                ids += ADDED
                mask += [0] * len(ADDED)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            num_turns=3,
            metrics=AgentLoopMetrics(),
            reward_score=0.5,
        )


def loops(cls: Callable[..., Any] = TwoTurns, max_tokens: int = 100) -> AgentLoops:
    return AgentLoops(
        {"single_turn_agent": SingleTurn()},
        default="single_turn_agent",
        sampling_params=PARAMS,
        max_tokens=max_tokens,
        tokenizer=None,
        config="the configuration",
        loops={"two_turns": cls},
    )


def new_sample() -> Sample:
    return Sample.from_prompt(ROW, group_index=0, index=0)


def run(agents: AgentLoops, sample: Sample, policy: Policy, row: Prompt = ROW) -> bool:
    return anyio.run(lambda: agents.run(sample, row, policy, seed=1))


def test_what_the_loop_adds_has_no_loss() -> None:
    sample = new_sample()
    assert run(loops(), sample, Policy())
    assert sample.prompt_ids == [1, 2]
    assert sample.response_ids == [10, 11, *ADDED, 20, 21]
    assert sample.loss_mask == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert [s.role for s in sample.segments] == ["prompt", "assistant", "tool", "assistant"]
    assert sample.status is Status.COMPLETED
    assert sample.episode is not None
    assert (sample.episode.turns, sample.episode.score) == (2, 0.5)


def test_the_loop_gets_the_columns_of_the_row() -> None:
    run(loops(), new_sample(), Policy())
    seen = TwoTurns.seen
    assert seen["raw_prompt"] == ROW.messages
    assert (seen["index"], seen["uid"], seen["config"]) == (3, "q", "the configuration")
    assert seen["reward_model"] == {"ground_truth": "4"}
    assert seen["tools_kwargs"] == {}


def test_other_rows_are_for_other_runners() -> None:
    class Single(SingleTurn):
        async def run(self, sample: Sample, row: Prompt, generate: Any, **more: Any) -> bool:
            sample.response = "single"
            return True

    sample = new_sample()
    agents = loops()
    agents._others = {"single_turn_agent": Single()}
    assert run(agents, sample, Policy(), Prompt(uid="q", ids=[1]))
    assert sample.response == "single"
    assert sample.episode is None


@pytest.mark.parametrize("stop_in", [0, 1])
def test_a_stopped_loop_is_replayed_and_continues(stop_in: int) -> None:
    whole, sample = new_sample(), new_sample()
    run(loops(), whole, Policy())
    policy = Policy(stop_in=stop_in)
    assert not run(loops(), sample, policy)
    assert sample.status is Status.PENDING
    policy.limits.clear()
    assert run(loops(), copy.deepcopy(sample), copy.deepcopy(policy))
    assert run(loops(), sample, policy)
    assert sample == whole
    assert len(policy.limits) == 2 - stop_in  # recorded turns are not generated again


def test_the_limit_of_a_turn_is_what_is_left() -> None:
    policy = Policy()
    run(loops(max_tokens=20), new_sample(), policy)
    assert policy.limits == [20, 16]


def test_a_loop_may_ask_for_fewer_tokens() -> None:
    class Short(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            params = {**sampling_params, "max_tokens": 5}
            out = await self.server_manager.generate("r", prompt_ids=[1], sampling_params=params)
            ids = out.token_ids
            return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids))

    policy = Policy()
    assert run(loops(Short), new_sample(), policy)
    assert policy.limits == [5]


def test_turns_without_tokens_between_them_stay_apart() -> None:
    class Chunks(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            ids: list[int] = []
            for turn in range(2):
                out = await self.server_manager.generate("r", prompt_ids=[1, *ids])
                assert out.token_ids == [10 * (turn + 1), 10 * (turn + 1) + 1]
                ids += out.token_ids
            return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids))

    sample = new_sample()
    assert run(loops(Chunks), sample, Policy())
    assert sample.response_ids == [10, 11, 20, 21]


def test_what_does_not_fit_is_not_appended() -> None:
    class Long(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            out = await self.server_manager.generate("r", prompt_ids=[1])
            ids = [*out.token_ids, *[5] * 1000]
            more = await self.server_manager.generate("r", prompt_ids=[1, *ids])
            assert more.token_ids == []
            mask = [1] * len(out.token_ids) + [0] * 1000
            return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=mask)

    sample = new_sample()
    assert run(loops(Long), sample, Policy())
    assert sample.status is Status.TRUNCATED
    assert sample.response_ids == [10, 11]


@pytest.mark.parametrize("way", ["bare", "group"])
def test_a_stop_that_the_loop_catches_still_stops(way: str) -> None:
    class Catches(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            if way == "group":
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.server_manager.generate("r", prompt_ids=[1]))
            with contextlib.suppress(BaseException):
                await self.server_manager.generate("r", prompt_ids=[1])
            return AgentLoopOutput(prompt_ids=[1], response_ids=[10], response_mask=[1])

    sample = new_sample()
    assert not run(loops(Catches), sample, Policy(stop_in=0))
    assert sample.status is Status.PENDING
    failed = new_sample()
    assert not run(loops(Catches), failed, Policy(fail=True))
    assert failed.status is Status.FAILED


def test_another_prompt_in_the_replay_fails_the_sample() -> None:
    class Dated(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            self.tokenizer.append(1)
            await self.server_manager.generate("r", prompt_ids=[len(self.tokenizer)])
            raise AssertionError

    agents, sample = loops(Dated), new_sample()
    agents._tokenizer = []
    policy = Policy(stop_in=0)
    assert not run(agents, sample, policy)
    assert not run(agents, sample, policy)
    assert "another prompt" in (sample.failure or "")


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_fails_the_sample(score: float) -> None:
    class Odd(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            output = await super().run(sampling_params, **row)
            output.reward_score = score
            return output

    sample = new_sample()
    assert not run(loops(Odd), sample, Policy())
    assert "reward_score" in (sample.failure or "")


def test_tokens_beyond_the_budget_truncate_the_sample() -> None:
    sample = new_sample()
    run(loops(max_tokens=4), sample, Policy())
    assert sample.status is Status.TRUNCATED


class Bad(AgentLoopBase):
    """Ends in one of several wrong ways."""

    how = ""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        generate = self.server_manager.generate
        out = await generate("r", prompt_ids=[1], sampling_params=sampling_params)
        ids = list(out.token_ids)
        if self.how == "rewrite":
            await generate("r", prompt_ids=[1, 99], sampling_params=sampling_params)
        if self.how == "raise":
            raise RuntimeError("broken agent")
        if self.how == "other":
            ids = [77, *ids]
        if self.how == "temperature":
            await generate("r", prompt_ids=[1, *ids, 5], sampling_params={"temperature": 0.1})
        if self.how == "unknown":
            await generate("r", prompt_ids=[1, *ids, 5], sampling_params={"temprature": 1.0})
        mask = [1] * (len(ids) - (self.how == "mask"))
        return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=mask)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rewrite", "does not begin with the 3 tokens"),
        ("raise", "broken agent"),
        ("other", "not the tokens that were sampled"),
    ],
)
def test_a_loop_that_goes_wrong_fails_its_sample(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bad, "how", how)
    sample = new_sample()
    assert not run(loops(Bad), sample, Policy())
    assert sample.status is Status.FAILED
    assert words in (sample.failure or "")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("temperature", "rollout.temperature"),
        ("unknown", "did you mean temperature"),
        ("mask", "response_mask"),
    ],
)
def test_a_loop_with_impossible_settings_ends_the_run(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bad, "how", how)
    with pytest.raises(DataError, match=words):
        run(loops(Bad), new_sample(), Policy())


def test_a_failed_engine_fails_the_sample() -> None:
    sample = new_sample()
    assert not run(loops(), sample, Policy(fail=True))
    assert sample.status is Status.FAILED
    assert "no memory" in (sample.failure or "")


def test_masked_tokens_of_the_policy_are_not_trained_on() -> None:
    class Masked(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            output = await super().run(sampling_params, **row)
            output.response_mask[0] = 0
            # VERL cuts responses that are too long.
            output.response_ids, output.response_mask = (
                output.response_ids[:5],
                output.response_mask[:5],
            )
            return output

    sample = new_sample()
    assert run(loops(Masked), sample, Policy())
    assert sample.loss_mask == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_registered_loops_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOPS", {})
    register("mine")(TwoTurns)
    assert registered_loops() == ["mine"]
    agents = loops()
    agents.check("mine")
    with pytest.raises(ConfigError, match="did you mean mine"):
        agents.check("minee")
