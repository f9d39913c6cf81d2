"""Environments of the library verifiers run unchanged: their client is the policy."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.build.episodes import make_episodes
from slipstream.data.lookup import build_tokenizer
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.agents.verifiers import VerifiersEpisodes, write_rows
from slipstream.rollout.agents.verl import AgentLoops
from slipstream.types import Prompt, Sample, Status
from tests.build.test_episodes import KEY, config_of
from tests.rollout.test_episode import RENDERER, Policy, ids

vf = pytest.importorskip(
    "verifiers", reason="needs verifiers<0.4, which excludes the extra `mcp`: make verifiers"
)
datasets = pytest.importorskip("datasets")

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
QUESTION = "who is ana 's boss ?"
CALL = """ana : <tool_call>{"name": "look_up", "arguments": {"name": "ana"}}</tool_call><end>"""
BROKEN = """<tool_call>{"name": "look_up", "arguments": {"name": "ana"</tool_call><end>"""
LAST = "answer ben<end>"


def look_up(name: str) -> str:
    """Look up a person.

    Args:
        name: The name.
    """
    return f"{name} : boss ben"


def right(completion: list[Any], answer: str) -> float:
    return 0.5 * float(completion[-1].content == f"answer {answer}")


def data() -> Any:
    prompt = [{"role": "user", "content": QUESTION}]
    return datasets.Dataset.from_list([{"prompt": prompt, "answer": "ben"}] * 2)


def tool_environment(**options: Any) -> Any:
    return vf.ToolEnv(tools=[look_up], dataset=data(), rubric=vf.Rubric(funcs=[right]), **options)


class User(vf.MultiTurnEnv):  # type: ignore[misc,name-defined]
    """Asks again after a turn, and may change what was said before."""

    how = "append"

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage(content="who is ben ?")]

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        if state["trajectory"] and self.how == "change":
            return [vf.UserMessage(content="who is dan ?"), *messages[1:]]
        if state["trajectory"] and self.how == "leave out":
            return messages[:1]
        if state["trajectory"] and self.how == "write":
            return [*messages, vf.AssistantMessage(content="so")]
        return messages


def user_environment(**options: Any) -> Any:
    return User(max_turns=2, dataset=data(), rubric=vf.Rubric(funcs=[right]), **options)


def prompt() -> Prompt:
    messages = [{"role": "user", "content": QUESTION}]
    return Prompt(uid="q", ids=[1], messages=messages, ground_truth="ben", extra_info={"index": 0})


def new_sample() -> Sample:
    return Sample.from_prompt(prompt(), group_index=0, index=0)


def play(environment: Any, sample: Sample, policy: Any, **limits: int) -> bool:
    options: dict[str, Any] = {"max_tokens": 100, **limits}
    episodes = VerifiersEpisodes(environment, RENDERER, sampling_params=PARAMS, **options)
    return anyio.run(lambda: episodes.run(sample, prompt(), policy, seed=1))


SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "The name."}},
            "required": ["name"],
        },
    },
}


def test_a_tool_environment_answers_calls_and_scores() -> None:
    sample = new_sample()
    assert play(tool_environment(), sample, Policy(CALL, LAST))
    opened = RENDERER.prompt(prompt().messages, [SCHEMA])  # type: ignore[arg-type]
    assert sample.prompt_ids == opened
    call = RENDERER.parse(ids(CALL))
    result = {"role": "tool", "name": "look_up", "content": "ana : boss ben"}
    _, added = RENDERER.extend(call, [result], [SCHEMA])
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
    record = sample.episode
    assert record is not None
    assert (sample.status, record.turns, record.calls) == (Status.COMPLETED, 2, 1)
    assert record.score == 0.5
    assert record.metrics == {
        "right": 0.5,
        "num_turns": 2.0,
        "total_tool_calls": 1.0,
        "look_up_calls": 1.0,
    }


def test_a_single_turn_is_an_episode() -> None:
    sample = new_sample()
    environment = vf.SingleTurnEnv(dataset=data(), rubric=vf.Rubric(funcs=[right]))
    assert play(environment, sample, Policy("answer dan<end>"))
    assert sample.response_ids == ids("answer dan<end>")
    assert sample.episode is not None
    assert (sample.episode.score, sample.episode.turns) == (0.0, 1)


def test_a_call_that_cannot_be_parsed_is_text() -> None:
    sample = new_sample()
    assert play(tool_environment(), sample, Policy(BROKEN))
    assert sample.episode is not None
    assert sample.episode.problems == {"unparsed": 1}
    assert sample.episode.metrics["total_tool_calls"] == 0.0


def test_a_user_is_answered() -> None:
    sample = new_sample()
    assert play(user_environment(), sample, Policy("so<end>", LAST))
    _, added = RENDERER.extend(
        RENDERER.parse(ids("so<end>")), [{"role": "user", "content": "who is ben ?"}]
    )
    assert sample.response_ids == [*ids("so<end>"), *added, *ids(LAST)]


@pytest.mark.parametrize(
    ("how", "words"),
    [("change", "do not continue"), ("leave out", "do not continue"), ("write", "assistant")],
)
def test_messages_that_do_not_continue_the_known_ones_fail_the_sample(how: str, words: str) -> None:
    environment, sample = user_environment(), new_sample()
    environment.how = how
    assert not play(environment, sample, Policy("so<end>", LAST))
    assert sample.status is Status.FAILED
    assert words in str(sample.failure)


def test_an_episode_without_room_for_a_turn_is_truncated_and_scored() -> None:
    sample = new_sample()
    assert play(tool_environment(), sample, Policy(CALL, LAST), max_tokens=len(ids(CALL)) + 2)
    assert sample.response_ids == ids(CALL)
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, "tokens")
    assert sample.episode.score == 0.0


def test_a_prompt_that_is_too_long_fails_the_sample() -> None:
    sample = new_sample()
    assert not play(tool_environment(), sample, Policy(LAST), max_prompt_tokens=3)
    assert "data.max_prompt_length" in str(sample.failure)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_stopped_episode_is_replayed_and_continues(turn: int) -> None:
    whole, sample = new_sample(), new_sample()
    assert play(tool_environment(), whole, Policy(CALL, LAST))
    policy = Policy(CALL, LAST, stop_after=turn)
    assert not play(tool_environment(), sample, policy)
    assert sample.status is Status.PENDING
    before = policy.calls
    assert play(tool_environment(), copy.deepcopy(sample), copy.deepcopy(policy))
    assert play(tool_environment(), sample, policy)
    assert sample == whole
    assert policy.calls - before == 2 - turn  # recorded turns are not generated again


def test_errors_of_the_infrastructure_fail_the_sample_and_others_are_scored() -> None:
    class Failing(User):
        error: Any = None

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            raise self.error

    for error, scored in ((vf.InfraError("gone"), False), (vf.ToolError("no"), True)):
        environment = Failing(max_turns=2, dataset=data(), rubric=vf.Rubric(funcs=[right]))
        environment.error, sample = error, new_sample()
        assert play(environment, sample, Policy(LAST)) == scored
        assert (sample.status is Status.FAILED) != scored
        assert sample.episode is not None
        assert sample.episode.score == (0.5 if scored else None)


def test_an_environment_that_is_too_slow_is_truncated() -> None:
    class Slow(User):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            await asyncio.sleep(60)

    environment = Slow(
        max_turns=2, timeout_seconds=0.2, dataset=data(), rubric=vf.Rubric(funcs=[right])
    )
    sample = new_sample()
    assert play(environment, sample, Policy(LAST))
    assert sample.response_ids == ids(LAST)
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, "tool_seconds")


def test_sampling_arguments_of_the_environment_must_be_those_of_training() -> None:
    class Hot(User):
        arguments: Any = None

        async def get_model_response(self, state: Any, prompt: Any, **_: Any) -> Any:
            return await super().get_model_response(state, prompt, sampling_args=self.arguments)

    environment = Hot(max_turns=1, dataset=data(), rubric=vf.Rubric(funcs=[right]))
    environment.arguments = {"n": 1, "max_completion_tokens": 7}
    assert play(environment, new_sample(), Policy(LAST))
    environment.arguments = {"temperature": 0.1}
    with pytest.raises(DataError, match="temperature"):
        play(environment, new_sample(), Policy(LAST))


def test_rewards_of_whole_groups_are_refused() -> None:
    def best(completions: list[Any]) -> list[float]:
        return [1.0] * len(completions)

    environment = vf.SingleTurnEnv(dataset=data(), rubric=vf.Rubric(funcs=[best]))
    with pytest.raises(ConfigError, match="whole groups"):
        play(environment, new_sample(), Policy(LAST))


def test_rows_of_the_environment_become_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    question = {"question": QUESTION, "answer": "ben", "info": {"table": 3}}
    environment = vf.SingleTurnEnv(
        dataset=datasets.Dataset.from_list([question] * 3),
        system_prompt="so",
        rubric=vf.Rubric(funcs=[right]),
    )
    assert write_rows(environment, path, count=2) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    messages = [{"role": "system", "content": "so"}, {"role": "user", "content": QUESTION}]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == messages
    assert rows[0]["reward_model"]["ground_truth"] == "ben"
    assert rows[0]["extra_info"]["verifiers"]["info"] == {"table": 3}


FUNCTIONS = """
import verifiers as vf
from datasets import Dataset

def load_environment(turns=1):
    data = Dataset.from_list([{"question": "who is ana ?", "answer": "ben"}])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[lambda answer: 1.0]))

"""


def test_the_settings_name_a_function(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    line = [f"{KEY}.environment.path={path}", f"{KEY}.environment.name=load_environment"]
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    runner = make_episodes(config_of(*line), build_tokenizer())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert isinstance(runner, AgentLoops)
    episodes = runner._others["tool_agent"]
    assert isinstance(episodes, VerifiersEpisodes)
    assert isinstance(episodes._environment, vf.SingleTurnEnv)
    with pytest.raises(ConfigError, match="depth"):
        make_episodes(config_of(*line, f"{KEY}.environment.kwargs.depth=1"), build_tokenizer())
    other = tmp_path / "other.py"
    other.write_text("def load_environment():\n    return 3\n")
    line[0] = f"{KEY}.environment.path={other}"
    with pytest.raises(ConfigError, match=r"verifiers or a taskset, not int"):
        make_episodes(config_of(*line), build_tokenizer())
