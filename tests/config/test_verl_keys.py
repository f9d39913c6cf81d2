"""Every key of VERL is known, and a whole configuration of VERL gives few notices."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config import Config, Hardware, load_config
from slipstream.config.aliases import knows
from slipstream.config.notices import MOST_NAMED, MOST_OF_FILES, Warned
from slipstream.config.tree import options
from slipstream.config.verl_combined import COMBINED
from slipstream.config.verl_defaults import DEFAULTS, is_default
from slipstream.config.verl_keys import ONLY_NEUTRAL, WITHOUT_EFFECT, find
from tests.config.composed import composed

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"
RUNS = {f"{ACTOR}__ppo_micro_batch_size_per_gpu": 8, f"{ROLLOUT}__name": "vllm"}


def load(**changed: Any) -> tuple[Config, list[str]]:
    notices: list[str] = []
    config = load_config(
        values=composed(**RUNS, trainer__n_gpus_per_node=1, **changed),
        hardware=Hardware(gpus=1),
        notify=notices.append,
        verl=True,
    )
    return config, notices


def test_all_keys_with_a_default_are_known() -> None:
    assert len(DEFAULTS) > 900
    unknown = [key for key in DEFAULTS if key not in {*options(), *COMBINED} and not knows(key)]
    assert unknown == []


def test_a_whole_configuration_of_verl_gives_one_warning() -> None:
    config, notices = load()
    assert [isinstance(notice, Warned) for notice in notices] == [True]
    assert config.actor_rollout_ref.rollout.name == "embedded"
    assert config.algorithm.adv_estimator == "gae"
    assert config.data.max_response_length == 512
    assert config.critic.ppo_mini_batch_size == 256
    assert config.critic.ppo_max_token_len_per_gpu == 32768
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"
    assert config.trainer.max_actor_ckpt_to_keep is None
    assert config.reward_model.reward_manager == "naive"
    assert config.reward_model.num_workers is not None


def test_settings_of_a_composed_configuration_reach_their_aliases() -> None:
    config, _ = load(
        data__max_response_length=64,
        reward__reward_manager__name="dapo",
        reward__sandbox_fusion__max_concurrent=5,
        reward__custom_reward_function__path="mine.py",
    )
    assert config.data.max_response_length == 64
    assert config.reward_model.reward_manager == "dapo"
    assert config.reward_model.sandbox_fusion.max_concurrent == 5
    assert config.custom_reward_function.path == "mine.py"
    # The old spelling is set, and the new one has VERL's default.
    config, _ = load(custom_reward_function__path="old.py", custom_reward_function__name="score")
    assert config.custom_reward_function.path == "old.py"
    assert config.custom_reward_function.name == "score"


def test_null_in_a_file_is_the_default() -> None:
    config, _ = load(
        actor_rollout_ref__actor__optim__lr_warmup_steps=None,
        reward_model__reward_manager=None,
        data__max_prompt_length=None,
    )
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == -1
    assert config.reward_model.reward_manager == "naive"
    assert config.data.max_prompt_length == 512


def test_changed_keys_without_effect_are_named() -> None:
    _, notices = load(
        actor_rollout_ref__rollout__tensor_model_parallel_size=8,
        critic__fsdp__param_offload=True,
    )
    about = [notice for notice in notices if not isinstance(notice, Warned)]
    assert sorted(notice.partition(" ")[0] for notice in about) == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "critic.fsdp.param_offload",
    ]


def test_many_changed_keys_are_one_notice() -> None:
    keys = [key for key in DEFAULTS if key.startswith("global_profiler.")]
    assert len(keys) > MOST_NAMED > MOST_OF_FILES
    _, notices = load(**{key.replace(".", "__"): "changed" for key in keys})
    (notice,) = (notice for notice in notices if not isinstance(notice, Warned))
    assert notice.startswith(f"{len(keys)} keys of the configuration have no effect here: ")
    assert notice.endswith(f"and {len(keys) - MOST_NAMED} more")


@pytest.mark.parametrize(
    ("key", "table", "found"),
    [
        ("critic.megatron.param_offload", WITHOUT_EFFECT, "*.megatron.*offload*"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable", ONLY_NEUTRAL, "*.qat.enable"),
        ("trainer.balance_batch", WITHOUT_EFFECT, "trainer.balance_batch"),
        ("trainer.balance_batch_size", WITHOUT_EFFECT, None),
        ("balance_batch", WITHOUT_EFFECT, None),
    ],
)
def test_keys_are_found_in_tables(key: str, table: dict[str, Any], found: str | None) -> None:
    assert find(key, table) == (None if found is None else table[found])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, True),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 4, False),
        ("trainer.balance_batch", True, True),
        ("trainer.balance_batch", 1, False),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ("model", "optimizer", "extra"), True),
        ("no.such.key", None, False),
    ],
)
def test_defaults_of_verl(key: str, value: object, expected: bool) -> None:
    assert is_default(key, value) is expected
