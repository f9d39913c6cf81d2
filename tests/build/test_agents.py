"""Custom generate functions of slime, from the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.build.agents import make_custom_generate, turn_end_ids
from slipstream.build.episodes import has_episodes, make_episodes, turn_ends
from slipstream.build.rollouts import eval_settings
from slipstream.config import Hardware, load_config
from slipstream.config.schema import Config
from slipstream.data.lookup import build_tokenizer
from slipstream.errors import ConfigError
from slipstream.rollout.agents.slime import CustomGenerate
from slipstream.rollout.agents.verl import AgentLoops

ROLLOUT = "actor_rollout_ref.rollout"
KEY = f"{ROLLOUT}.agent.custom_generate_function_path"
FUNCTIONS = """
async def generate(args, sample, sampling_params, evaluation=False):
    return sample

def plain(args, sample, sampling_params):
    return sample
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with functions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slime_functions.py").write_text(FUNCTIONS)
    return "slime_functions"


def config_of(*overrides: str) -> Config:
    line = ["data.train_files=[train.jsonl]", "actor_rollout_ref.model.path=model", *overrides]
    return load_config(overrides=line, hardware=Hardware(gpus=0), notify=lambda _: None)


def test_without_a_path_there_is_none() -> None:
    assert make_custom_generate(config_of(), build_tokenizer(), evaluation=False) is None
    assert not has_episodes(config_of())


def test_the_function_runs_all_rows(module: str) -> None:
    config = config_of(f"{KEY}={module}.generate")
    assert has_episodes(config)
    for evaluation in (False, True):
        runner = make_episodes(config, build_tokenizer(), evaluation=evaluation)
        assert isinstance(runner, AgentLoops)
        assert runner._default == "custom_generate"
        custom = runner._others["custom_generate"]
        assert isinstance(custom, CustomGenerate)
        assert custom._settings.evaluation is evaluation
    assert turn_ends(config, build_tokenizer()) == ()


def test_validation_tells_the_function_that_it_is_one(module: str) -> None:
    runner = eval_settings(config_of(f"{KEY}={module}.generate"), build_tokenizer()).episodes
    assert isinstance(runner, AgentLoops)
    custom = runner._others["custom_generate"]
    assert isinstance(custom, CustomGenerate)
    assert custom._settings.evaluation


def test_other_rows_can_be_single_turns(module: str) -> None:
    agent = f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"
    runner = make_episodes(config_of(f"{KEY}={module}.generate", agent), build_tokenizer())
    assert isinstance(runner, AgentLoops)
    assert runner._default == "single_turn_agent"
    runner.check("custom_generate")


def test_the_function_gets_the_settings_in_slimes_words(module: str) -> None:
    settings = ("temperature=0.5", "stop=['</search>']", "stop_token_ids=[7]", "n=4")
    line = [f"{ROLLOUT}.{setting}" for setting in settings]
    config = config_of(f"{KEY}={module}.generate", "data.max_response_length=90", *line)
    tokenizer = build_tokenizer()
    custom = make_custom_generate(config, tokenizer, evaluation=False)
    assert custom is not None
    given = custom._settings
    assert given.args.rollout_temperature == given.sampling_params["temperature"] == 0.5
    assert given.args.rollout_stop == given.sampling_params["stop"] == ["</search>"]
    assert given.sampling_params["stop_token_ids"] == [7]
    assert given.args.rollout_max_response_len == given.sampling_params["max_new_tokens"] == 90
    assert (given.args.n_samples_per_prompt, given.args.partial_rollout) == (4, False)
    assert given.end_token_ids == (tokenizer.eos_token_id, 7)


def test_a_turn_past_end_of_sequence_ends_at_stop_tokens_only() -> None:
    config = config_of(f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.stop_token_ids=[7]")
    assert turn_end_ids(config, build_tokenizer()) == (7,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slime_functions.generat", "'generat' is not in .* did you mean generate"),
        ("slime_functions.plain", "async def"),
        ("no_such_module.generate", "does not import"),
        ("generate", "must be package.module.function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_episodes(config_of(f"{KEY}={name}"), build_tokenizer())
    assert KEY in str(caught.value)
