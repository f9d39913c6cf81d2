"""Tasksets and environments of verifiers' v1 API: a harness asks the policy over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.build.episodes import make_episodes
from slipstream.data.lookup import build_tokenizer
from slipstream.errors import ConfigError, DataError, EngineError, SlipstreamError
from slipstream.rollout.agents.verifiers import write_rows
from slipstream.rollout.agents.verifiers_v1 import TaskEpisodes
from slipstream.rollout.agents.verl import AgentLoops
from slipstream.types import Generation, Prompt, Sample, Status, StopReason
from slipstream.user_code import import_module
from tests.build.test_episodes import KEY, config_of
from tests.rollout.test_episode import RENDERER, Policy, ids

pytest.importorskip(
    "verifiers", reason="needs verifiers<0.4, which excludes the extra `mcp`: make verifiers"
)
vf = pytest.importorskip("verifiers.v1")

FILE = Path(__file__).with_name("people_taskset.py")
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
QUESTION = "who is ana 's boss ?"
CALL = """ana : <tool_call>{"name": "look_up", "arguments": {"name": "ana"}}</tool_call><end>"""
THOUGHT = "<think>ana</think>so<end>"
LAST = "answer ben<end>"


@cache
def people() -> Any:
    """The module of the user. It is imported by its path, as in a run."""
    return import_module(FILE, key="path")


def environment(how: str = "", **options: Any) -> Any:
    return people().load_environment(how, **options)


def prompt(**data: Any) -> Prompt:
    messages = [{"role": "user", "content": QUESTION}]
    given = {"idx": 0, "prompt": QUESTION, "answer": "ben", **data}
    return Prompt(uid="q", ids=[1], messages=messages, extra_info={"verifiers": given})


def new_sample() -> Sample:
    return Sample.from_prompt(prompt(), group_index=0, index=0)


def episodes_of(found: Any, max_tokens: int = 100, **limits: int) -> TaskEpisodes:
    return TaskEpisodes(found, RENDERER, sampling_params=PARAMS, max_tokens=max_tokens, **limits)


def play(found: Any, sample: Sample, policy: Any, row: Prompt | None = None, **limits: int) -> bool:
    episodes = episodes_of(found, **limits)
    return anyio.run(lambda: episodes.run(sample, row or prompt(), policy, seed=1))


class Broken(Policy):
    """An engine that fails, by an exception or by a failed generation."""

    error: Exception | None = None

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        if self.error is not None:
            raise self.error
        generation = await super().__call__(sample, max_tokens)
        generation.stop_reason, generation.error = StopReason.ERROR, "the engine broke"
        return generation


class Slow(Policy):
    """Does not return from the turn after `fast` others."""

    fast = 0

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        if self.calls == self.fast:
            await asyncio.sleep(60)
        return await super().__call__(sample, max_tokens)


def test_a_harness_with_a_tool_is_served_and_its_task_scores() -> None:
    sample = new_sample()
    assert play(environment(), sample, policy := Policy(CALL, LAST))
    tools = [people().TOOL]
    opened = RENDERER.prompt([{"role": "user", "content": QUESTION}], tools)
    assert sample.prompt_ids == opened
    result = {"role": "tool", "name": "look_up", "content": "ana : boss ben"}
    _, added = RENDERER.extend(RENDERER.parse(ids(CALL)), [result], tools)
    assert [segment.role for segment in sample.segments] == [
        "prompt",
        "assistant",
        "tool",
        "assistant",
    ]
    assert sample.response_ids == [*ids(CALL), *added, *ids(LAST)]
    assert sample.loss_mask == [
        *[0.0] * len(opened),
        *[1.0] * len(ids(CALL)),
        *[0.0] * len(added),
        *[1.0] * len(ids(LAST)),
    ]
    assert policy.asked == [50, 50]  # the harness limits the tokens of a turn
    record = sample.episode
    assert record is not None
    assert (sample.status, record.turns, record.calls) == (Status.COMPLETED, 2, 1)
    assert record.score == pytest.approx(0.6)
    assert record.metrics == {"right": 0.5, "length": pytest.approx(0.1), "turns": 2.0}


def test_the_library_gets_the_sampled_tokens() -> None:
    seen: list[Any] = []

    class Seen(vf.SingleAgentEnv):  # type: ignore[misc,name-defined]
        async def finalize(self, task: Any, episode: Any) -> None:
            seen.extend(episode.traces)

    sample = new_sample()
    assert play(environment(base=Seen), sample, Policy(CALL, LAST))
    (branch,) = seen[0].branches
    assert branch.token_ids == sample.tokens
    assert branch.sampled_mask == [mask == 1.0 for mask in sample.loss_mask]
    assert branch.logprobs == [-mask for mask in sample.loss_mask]
    assert branch.usage.completion_tokens == len(ids(CALL)) + len(ids(LAST))


def test_a_user_is_answered_and_reasoning_that_is_left_out_stays_in_the_tokens() -> None:
    first = RENDERER.parse(ids(THOUGHT))
    assert first.reasoning is not None
    for how in ("", "forget"):
        sample = new_sample()
        assert play(environment(how, tool=False), sample, Policy(THOUGHT, LAST))
        _, added = RENDERER.extend(first, [{"role": "user", "content": "who is ben ?"}])
        assert sample.response_ids == [*ids(THOUGHT), *added, *ids(LAST)]
        assert sample.episode is not None
        assert sample.episode.score == pytest.approx(0.6)


def test_a_call_may_be_sent_back_with_other_spaces() -> None:
    call, whole, sample = CALL.removeprefix("ana : "), new_sample(), new_sample()
    assert play(environment(), whole, Policy(call, LAST))
    assert play(environment("rewrite"), sample, Policy(call, LAST))
    assert sample.tokens == whole.tokens
    assert sample.episode is not None
    assert sample.episode.turns == 2


def test_an_episode_without_room_for_a_turn_is_truncated_and_scored() -> None:
    sample = new_sample()
    assert play(environment(), sample, Policy(CALL, LAST), max_tokens=len(ids(CALL)) + 2)
    assert sample.response_ids == ids(CALL)
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, "tokens")
    assert sample.episode.metrics["right"] == 0.0


def test_a_limit_of_the_agent_ends_the_episode() -> None:
    sample = new_sample()
    assert play(environment(max_turns=1), sample, Policy(CALL, LAST))
    assert sample.response_ids == ids(CALL)
    assert sample.status is Status.COMPLETED


def test_a_harness_that_is_too_slow_is_truncated() -> None:
    sample, timeout = new_sample(), vf.TaskTimeout(agent=0.2).model_dump()
    assert play(environment("sleep"), sample, Policy(LAST), prompt(timeout=timeout))
    assert sample.response_ids == ids(LAST)
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, "tool_seconds")
    assert sample.episode.score == 0.0


def test_a_turn_that_a_timeout_cuts_off_is_left_out() -> None:
    sample, timeout = new_sample(), vf.TaskTimeout(agent=1.0).model_dump()
    policy = Slow(CALL, LAST)
    policy.fast = 1
    assert play(environment(), sample, policy, prompt(timeout=timeout))
    assert sample.response_ids == ids(CALL)
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize("turn", [0, 1])
def test_a_stopped_episode_is_replayed_and_continues(turn: int) -> None:
    whole, sample = new_sample(), new_sample()
    assert play(environment(), whole, Policy(CALL, LAST))
    policy = Policy(CALL, LAST, stop_after=turn)
    assert not play(environment(), sample, policy)
    assert sample.status is Status.PENDING
    before = policy.calls
    assert play(environment(), copy.deepcopy(sample), copy.deepcopy(policy))
    assert play(environment(), sample, policy)
    assert whole.episode is not None
    assert sample.episode is not None
    whole.episode.tool_seconds = sample.episode.tool_seconds = 0.0
    assert sample == whole
    assert policy.calls - before == 2 - turn  # recorded turns are not generated again


@pytest.mark.parametrize(
    ("later", "words"),
    [({"prompt": "who is dan ?"}, "began with another prompt"), ({}, "ended earlier")],
)
def test_a_replay_that_differs_fails_the_sample(later: dict[str, str], words: str) -> None:
    sample, policy = new_sample(), Policy(CALL, LAST, stop_after=1)
    assert not play(environment(), sample, policy)
    turns = 2 if later else 1
    assert not play(environment(turns=turns), sample, policy, prompt(**later))
    assert sample.status is Status.FAILED
    assert f"replay: the environment {words}" in str(sample.failure)


@pytest.mark.parametrize("why", ["stopped", "broken"])
def test_a_harness_that_catches_errors_does_not_go_on(why: str) -> None:
    policy = Policy(LAST, stop_after=0) if why == "stopped" else Broken(LAST)
    assert not play(environment("catch"), new_sample(), policy)
    assert not people().caught


@pytest.mark.parametrize(
    ("how", "policy", "words"),
    [("change", Policy, "do not continue"), ("twice", Slow, "at the same time")],
)
def test_requests_that_do_not_continue_each_other_fail_the_sample(
    how: str, policy: type[Policy], words: str
) -> None:
    sample = new_sample()
    assert not play(environment(how), sample, policy(CALL, LAST))
    assert sample.status is Status.FAILED
    assert words in str(sample.failure)


def test_failures_of_the_engine_fail_the_sample_or_end_the_run() -> None:
    sample = new_sample()
    assert not play(environment(), sample, Broken(CALL, LAST))
    assert (sample.status, sample.failure) == (Status.FAILED, "verifiers: the engine broke")
    policy = Broken(CALL, LAST)
    policy.error = EngineError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        play(environment(), new_sample(), policy)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("hot", DataError, "temperature"),
        ("responses", ConfigError, "ResponsesDialect"),
        ("stream", ConfigError, "a streamed answer"),
    ],
)
def test_requests_that_are_not_supported_end_the_run(
    how: str, error: type[SlipstreamError], words: str
) -> None:
    with pytest.raises(error, match=words):
        play(environment(how), new_sample(), Policy(CALL, LAST))


def test_errors_that_the_policy_may_have_caused_are_scored() -> None:
    for how, fails, score in (("raise", "", 0.0), ("", "reward", 0.0)):
        sample = new_sample()
        assert play(environment(how), sample, Policy(LAST), prompt(fails=fails))
        assert sample.response_ids == ids(LAST)
        assert sample.episode is not None
        assert (sample.status, sample.episode.score) == (Status.COMPLETED, score)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("sandbox", "SandboxError: the box is gone"),
        ("setup", "without a turn of the policy (TaskError: task setup: OSError: no room)"),
    ],
)
def test_errors_of_the_infrastructure_fail_the_sample(fails: str, words: str) -> None:
    sample = new_sample()
    assert not play(environment(), sample, Policy(LAST), prompt(fails=fails))
    assert sample.status is Status.FAILED
    assert words in str(sample.failure)


def test_an_error_of_the_environment_fails_the_sample() -> None:
    class Failing(vf.SingleAgentEnv):  # type: ignore[misc,name-defined]
        async def finalize(self, task: Any, episode: Any) -> None:
            raise OSError("no judge")

    sample = new_sample()
    assert not play(environment(base=Failing), sample, Policy(LAST))
    assert "EnvError" in str(sample.failure)
    assert "no judge" in str(sample.failure)


def test_several_conversations_in_an_episode_are_refused() -> None:
    class Again(vf.SingleAgentEnv):  # type: ignore[misc,name-defined]
        async def run(self, task: Any, agents: Any) -> None:
            await agents.agent.run(task)
            await agents.agent.run(task)

    class TwoConfig(vf.SingleAgentEnvConfig):  # type: ignore[misc,name-defined]
        judge: vf.AgentConfig = vf.AgentConfig()  # type: ignore[name-defined]

    class Two(vf.Env[TwoConfig]):  # type: ignore[misc,name-defined]
        async def run(self, task: Any, agents: Any) -> None:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"multi_turn\.environment: .* more than once"):
        play(environment(base=Again), new_sample(), Policy(LAST, LAST))
    with pytest.raises(ConfigError, match="more than once"):
        play(environment(base=Again), new_sample(), Policy(LAST), prompt(fails="setup"))
    config = environment().config
    two = Two(TwoConfig(taskset=config.taskset, agent=config.agent, judge=config.agent))
    with pytest.raises(ConfigError, match="has the agents agent, judge"):
        episodes_of(two)


def tasks_of(name: str) -> list[Any]:
    """The tasks of the event loop that run a coroutine with this name."""
    return [task for task in asyncio.all_tasks() if name in repr(task.get_coro())]


def test_episodes_share_the_server_of_their_event_loop() -> None:
    episodes = episodes_of(environment())
    samples = [new_sample() for _ in range(3)]

    async def together(closes: bool) -> None:
        async with anyio.create_task_group() as tasks:
            for sample in samples:

                async def one(sample: Sample = sample) -> None:
                    assert await episodes.run(sample, prompt(), Policy(CALL, LAST), seed=1)

                tasks.start_soon(one)
        assert len(tasks_of("TaskEpisodes._serve")) == 1
        if closes:
            await episodes.close()
            assert len(asyncio.all_tasks()) == 1

    for closes in (True, False, False):  # each loop has a server of its own
        samples[:] = [new_sample() for _ in range(3)]
        anyio.run(together, closes)
        assert all(sample.tokens == samples[0].tokens for sample in samples)
        assert samples[0].status is Status.COMPLETED
    anyio.run(episodes.close)


def test_an_episode_that_is_cancelled_ends_its_agent() -> None:
    episodes = episodes_of(environment("sleep"))

    async def cancelled() -> None:
        asked = anyio.Event()

        class Asked(Policy):
            async def __call__(self, *args: Any) -> Generation:
                asked.set()
                return await super().__call__(*args)

        policy = Asked(LAST)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: episodes.run(new_sample(), prompt(), policy, seed=1))
            await asked.wait()
            assert tasks_of("run_episode")
            tasks.cancel_scope.cancel()
        assert not tasks_of("run_episode")
        await episodes.close()

    anyio.run(cancelled)


def test_a_taskset_is_played_with_the_harness_of_its_module() -> None:
    sample = new_sample()
    assert play(people().load_taskset(), sample, Policy(CALL, LAST))
    assert sample.episode is not None
    assert sample.episode.score == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="id=__name__"):
        episodes_of(people().People(vf.TasksetConfig()))


def test_rows_must_have_the_data_of_a_task() -> None:
    bare = Prompt(uid="q", ids=[1], messages=prompt().messages)
    with pytest.raises(DataError, match="write_rows"):
        play(environment(), new_sample(), Policy(LAST), bare)
    with pytest.raises(DataError, match="does not fit People"):
        play(environment(), new_sample(), Policy(LAST), prompt(answer=3))


def test_tasks_become_a_data_file(tmp_path: Path) -> None:
    path, taskset = tmp_path / "train.jsonl", people().load_taskset()
    assert write_rows(environment(), path) == 3
    assert write_rows(taskset, path, count=2) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[1]["data_source"] == "People"
    assert rows[1]["prompt"] == [{"role": "user", "content": QUESTION}]
    assert rows[1]["reward_model"]["ground_truth"] == "dan"
    sample, row = new_sample(), prompt(**rows[1]["extra_info"]["verifiers"])
    assert play(taskset, sample, Policy("answer dan<end>"), row)
    assert sample.episode is not None
    assert sample.episode.metrics["right"] == 0.5
    with pytest.raises(ConfigError, match="'eval'"):
        write_rows(taskset, path, split="eval")
    taskset.INFINITE = True
    with pytest.raises(ConfigError, match="count"):
        write_rows(taskset, path)


def test_messages_of_a_task_become_the_prompt_of_its_row(tmp_path: Path) -> None:
    user = vf.UserMessage(content="who is dan ?")

    class Chats(people().People):  # type: ignore[misc]
        def load(self) -> Any:
            data = people().PersonData(idx=5, prompt=[user], system_prompt="so")
            yield people().Person(data, self.config.task)

    path = tmp_path / "train.jsonl"
    assert write_rows(Chats(vf.TasksetConfig(id="chats")), path) == 1
    row = json.loads(path.read_text())
    assert row["data_source"] == "chats"
    assert row["prompt"] == [
        {"role": "system", "content": "so"},
        {"role": "user", "content": "who is dan ?"},
    ]


@pytest.mark.parametrize("name", ["load_environment", "load_taskset"])
def test_the_settings_name_a_function(name: str, tmp_path: Path) -> None:
    path = tmp_path / "people.py"
    path.write_text(FILE.read_text().replace("def load_taskset", "def load_environment"))
    if name == "load_environment":
        path = FILE
    line = [f"{KEY}.environment.path={path}", f"{KEY}.environment.name=load_environment"]
    runner = make_episodes(config_of(*line), build_tokenizer())
    assert isinstance(runner, AgentLoops)
    episodes = runner._others["tool_agent"]
    assert isinstance(episodes, TaskEpisodes)
    assert isinstance(episodes._environment, vf.SingleAgentEnv)
