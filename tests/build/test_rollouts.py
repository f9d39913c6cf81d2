"""Settings of rollouts and validations."""

from __future__ import annotations

from slipstream.build.rollouts import eval_settings, make_rollouts
from slipstream.config import Hardware, load_config
from slipstream.data.data_buffer import DataBuffer
from slipstream.data.lookup import build_tokenizer
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.types import Prompt
from tests.rollout.test_manager_episodes import Scorer


def test_the_deadline_of_an_episode_holds_in_training_and_validation() -> None:
    line = ["data.task=lookup", "actor_rollout_ref.rollout.episode_timeout_s=7"]
    config = load_config(line, recipe="tiny", hardware=Hardware(gpus=0))
    tokenizer = build_tokenizer()
    core = ScriptedCore(lambda request: [1], vocab_size=len(tokenizer), max_model_len=64)
    rollouts = make_rollouts(
        config, FakeEngine(core), DataBuffer([Prompt(uid="q", ids=[1])]), Scorer(), tokenizer
    )
    assert rollouts.settings.episode_timeout_s == 7
    assert eval_settings(config, tokenizer).episode_timeout_s == 7
