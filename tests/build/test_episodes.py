"""What runs episodes, from the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.build.episodes import (
    changed_turns,
    check_agents,
    check_rows,
    has_episodes,
    make_episodes,
    make_renderer,
    make_tools,
    tool_limits,
    tool_schemas,
    turn_ends,
)
from slipstream.config import Hardware, load_config
from slipstream.config.schema import Config
from slipstream.data.lookup import build_tokenizer
from slipstream.environment.tools.protocol import tool_name
from slipstream.errors import ConfigError, DataError
from slipstream.rollout.agents.tinker import TinkerEpisodes
from slipstream.rollout.agents.verl import AgentLoops
from slipstream.rollout.episode import Episodes
from slipstream.types import Prompt
from tests.data.helpers import char_tokenizer
from tests.rollout.tool_templates import tool_tokenizer

KEY = "actor_rollout_ref.rollout.multi_turn"
TOOL = '''
def shout(text: str) -> str:
    """Shout.

    Args:
        text: A text.
    """
    return text.upper()
'''


def config_of(*overrides: str) -> Config:
    line = ["data.train_files=[train.jsonl]", "actor_rollout_ref.model.path=model", *overrides]
    return load_config(overrides=line, hardware=Hardware(gpus=0), notify=lambda _: None)


def test_without_tools_every_response_is_a_single_turn() -> None:
    config = config_of()
    assert not has_episodes(config)
    assert make_episodes(config, build_tokenizer()) is None
    assert tool_schemas(config) is None


def test_tools_of_task_and_files_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL)
    config = config_of(
        f"{KEY}.function_tool_path={path}", "data.task=lookup", "data.train_files=null"
    )
    assert [tool_name(tool.schema) for tool in make_tools(config)] == ["look_up", "shout"]
    assert [tool_name(schema) for schema in tool_schemas(config) or []] == ["look_up", "shout"]
    assert make_episodes(config, build_tokenizer()) is not None
    assert turn_ends(config, build_tokenizer()) == (build_tokenizer().eos_token_id,)


def test_multi_turn_can_be_disabled(tmp_path: Path) -> None:
    config = config_of("data.task=lookup", "data.train_files=null", f"{KEY}.enable=false")
    assert not has_episodes(config)


def test_multi_turn_without_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="function_tool_path"):
        config_of(f"{KEY}.enable=true")


def test_the_format_is_named_or_found(tmp_path: Path) -> None:
    assert make_renderer(config_of(), build_tokenizer()).call_format.name == "hermes"
    named = config_of(f"{KEY}.format=mistral")
    assert make_renderer(named, build_tokenizer()).call_format.name == "mistral"
    with pytest.raises(ConfigError, match=r"multi_turn\.format"):
        make_renderer(config_of(), char_tokenizer())
    with pytest.raises(ConfigError, match="custom_chat_template"):
        make_renderer(config_of(), char_tokenizer(chat_template=None))


ENVIRONMENTS = '''
import gymnasium

class Trl:
    def reset(self, **row): ...

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: A number.
        """
        return "no"

    def get_reward(self) -> float:
        return 1.0

class Gym(gymnasium.Env):
    def __init__(self, size=1):
        self.size = size

class Own:
    async def reset(self, row, seed): ...
    async def step(self, turn): ...
    async def score(self): ...
    async def close(self): ...

class Half:
    async def reset(self, row, seed): ...
    async def step(self, turn): ...

class Tinker:
    async def initial_observation(self): ...
    async def step(self, action): ...

def tinker(size):
    return Tinker()
'''


@pytest.mark.parametrize(("name", "itself"), [("Trl", True), ("Gym", True), ("Own", False)])
def test_an_environment_is_recognized_by_its_form(tmp_path: Path, name: str, itself: bool) -> None:
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    line = [f"{KEY}.environment.path={path}", f"{KEY}.environment.name={name}"]
    episodes = with_tools(config_of(*line))
    assert episodes._limits.scores_itself == itself
    assert episodes._make() is not None
    # With a reward function of its own, the run scores the answers, too.
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs): return 1.0")
    config = config_of(*line, f"custom_reward_function.path={reward}")
    assert not with_tools(config)._limits.scores_itself
    config = config_of(*line, f"reward_model.terms={{mine: {{path: {reward}}}}}")
    assert not with_tools(config)._limits.scores_itself


def with_tools(config: Config) -> Episodes:
    runner = make_episodes(config, build_tokenizer())
    assert isinstance(runner, AgentLoops)
    episodes = runner._others["tool_agent"]
    assert isinstance(episodes, Episodes)
    return episodes


@pytest.mark.parametrize("name", ["Tinker", "tinker"])
def test_an_environment_of_token_ids_needs_no_chat_template(tmp_path: Path, name: str) -> None:
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    stops = "actor_rollout_ref.rollout.stop=['</a>']"
    line = [f"{KEY}.environment.path={path}", f"{KEY}.environment.name={name}", stops]
    tokenizer = char_tokenizer(chat_template=None)
    config = config_of(*line)
    runner = make_episodes(config, tokenizer)
    assert isinstance(runner, AgentLoops)
    found = runner._others["tool_agent"]
    assert isinstance(found, TinkerEpisodes)
    assert found._limits.scores_itself
    assert found._ends == {tokenizer.eos_token_id, tokenizer.eos_token, "</a>"}
    assert turn_ends(config, tokenizer) == ()
    assert changed_turns(config, tokenizer) is None
    assert tool_schemas(config) is None
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs): return 1.0")
    runner = make_episodes(config_of(*line, f"custom_reward_function.path={reward}"), tokenizer)
    assert isinstance(runner, AgentLoops)
    found = runner._others["tool_agent"]
    assert isinstance(found, TinkerEpisodes)
    assert not found._limits.scores_itself


def test_objects_of_an_environment_are_shared_by_training_and_validation(tmp_path: Path) -> None:
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    config = config_of(f"{KEY}.environment.path={path}", f"{KEY}.environment.name=Trl")
    assert with_tools(config)._make is with_tools(config)._make


def test_a_row_may_ask_for_a_single_turn_or_for_an_unknown_loop() -> None:
    runner = make_episodes(
        config_of("data.task=lookup", "data.train_files=null"), build_tokenizer()
    )
    assert isinstance(runner, AgentLoops)
    runner.check("single_turn_agent")
    with pytest.raises(ConfigError, match="my_agent"):
        runner.check("my_agent")
    agent = "actor_rollout_ref.rollout.agent.default_agent_loop"
    with pytest.raises(ConfigError, match="tool_config_path"):
        make_episodes(config_of(f"{agent}=tool_agent"), build_tokenizer())


@pytest.mark.parametrize(("name", "words"), [("Half", "'score'"), ("Nothing", "'Nothing'")])
def test_an_environment_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, words: str
) -> None:
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    line = [f"{KEY}.environment.path={path}", f"{KEY}.environment.name={name}"]
    with pytest.raises(ConfigError, match=words):
        make_episodes(config_of(*line), build_tokenizer())


def test_an_environment_replaces_tools() -> None:
    with pytest.raises(ConfigError, match="replaces"):
        config_of(f"{KEY}.environment.path=a.py", f"{KEY}.function_tool_path=b.py")
    with pytest.raises(ConfigError, match="python_tool"):
        config_of(f"{KEY}.environment.path=a.py", f"{KEY}.python_tool=true")
    line = ["data.train_files=[]", "data.task=lookup", f"{KEY}.environment.path=a.py"]
    with pytest.raises(ConfigError, match=r"data\.task=null"):
        make_episodes(config_of(*line), build_tokenizer())


@pytest.mark.parametrize("tool", ["python_tool=true", "mcp_config_path=servers.json"])
def test_tools_without_multi_turn_are_refused(tool: str) -> None:
    with pytest.raises(ConfigError, match=r"has no effect with .*enable=false"):
        config_of(f"{KEY}.enable=false", f"{KEY}.{tool}")


def test_a_template_that_changes_earlier_turns_is_announced(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL)
    config = config_of(f"{KEY}.function_tool_path={path}")
    assert changed_turns(config, build_tokenizer()) is None
    assert changed_turns(config_of(), tool_tokenizer("mistral")) is None
    note = changed_turns(config, tool_tokenizer("mistral"))
    assert note is not None
    assert "a second question" in note


def test_the_sandbox_can_be_a_tool() -> None:
    (tool,) = make_tools(config_of(f"{KEY}.python_tool=true"))
    assert tool_name(tool.schema) == "python"
    # The sandbox ends a program first.
    assert tool.timeout_s > 50.0
    assert has_episodes(config_of(f"{KEY}.python_tool=true"))


def test_a_row_with_an_unknown_agent_loop_is_refused_before_the_run(tmp_path: Path) -> None:
    def prompts(*names: str | None) -> list[Prompt]:
        rows = [{} if name is None else {"agent_name": name} for name in names]
        return [Prompt(uid=str(i), ids=[1], extra_info=row) for i, row in enumerate(rows)]

    tools = tmp_path / "tools.py"
    tools.write_text(TOOL)
    config = config_of(f"{KEY}.function_tool_path={tools}")
    check_agents(config, prompts(None, "tool_agent", "single_turn_agent"))
    with pytest.raises(ConfigError, match="there is no agent loop 'tool_agnet'") as caught:
        check_agents(config, prompts(None, "tool_agnet"))
    assert "tool_agent" in str(caught.value)
    # Without tools and loops, every response is a single turn, and a warning says so.
    check_agents(config_of(), prompts("tool_agnet"))


def test_answers_are_limited_in_tokens_of_the_policy() -> None:
    config = config_of(
        f"{KEY}.python_tool=true",
        f"{KEY}.max_tool_response_tokens=2",
        f"{KEY}.tool_response_truncate_side=right",
    )
    limits = tool_limits(config, build_tokenizer())
    assert limits.cut("ana 's boss : ben") == "ana 's...(truncated)"
    assert limits.cut("ana 's") == "ana 's"


@pytest.mark.parametrize(
    "setting",
    [
        "history=rerender",
        "max_tool_response_tokens=9",
        "max_assistant_turns=2",
        "max_user_turns=2",
        "max_tool_seconds=5.0",
        "max_parallel_calls=4",
        "max_tool_response_length=99",
        "tool_response_truncate_side=left",
    ],
)
def test_settings_of_tools_without_tools_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}.{setting} has no effect without tools"):
        config_of(f"{KEY}.{setting}")
    config_of(f"{KEY}.{setting}", f"{KEY}.python_tool=true")


def test_agent_loops_read_the_limits_of_tools() -> None:
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"
    config_of(f"{KEY}.max_assistant_turns=2", loops)


def test_two_tools_of_one_name_are_refused_with_their_settings(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL.replace("shout", "python"))
    config = config_of(f"{KEY}.function_tool_path={path}", f"{KEY}.python_tool=true")
    with pytest.raises(ConfigError, match=r"'python', of .*_tool_path=.*python_tool=true"):
        make_tools(config)


def test_every_row_must_choose_an_interaction(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    base = "slipstream.compat.verl.interactions.base.BaseInteraction"
    path.write_text(f"interaction: [{{name: teacher, class_name: {base}}}]")
    config = config_of(f"{KEY}.interaction_config_path={path}")
    chosen = {"interaction_kwargs": {"name": "teacher"}}
    check_rows(config, [Prompt(uid="a", ids=[1], extra_info=chosen)])
    # This row has no conversation.
    check_rows(config, [Prompt(uid="b", ids=[1], extra_info={"agent_name": "single_turn_agent"})])
    with pytest.raises(DataError, match=r"row c: .*known: teacher"):
        check_rows(config, [Prompt(uid="c", ids=[1])])


def test_rows_for_an_unknown_tool_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL)
    config = config_of(f"{KEY}.function_tool_path={path}")

    def rows(*names: str) -> list[Prompt]:
        value = {"create_kwargs": {"x": 1}}
        given = [{"tools_kwargs": {name: value, "unused": None}} for name in names]
        return [Prompt(uid=str(n), ids=[1], extra_info=one) for n, one in enumerate(given)]

    check_rows(config, rows("shout", "shout"))
    assert caplog.messages == []
    check_rows(config, rows("shout", "shuot"))
    (message,) = caplog.messages
    assert "1 of 2 rows have tools_kwargs of 'shuot'" in message
    assert "did you mean shout" in message
    assert f"{KEY}.function_tool_path" in message
