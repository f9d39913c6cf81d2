"""Whole composed configurations of VERL in its classes and functions."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from slipstream.compat.verl import (
    RayPPOTrainer,
    create_rl_dataset,
    create_rl_sampler,
    get_custom_reward_fn,
    load_reward_manager,
)
from slipstream.config import Config, Hardware, load_config
from slipstream.config.notices import MOST_OF_FILES
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import ConfigError
from slipstream.rewards.manager import DAPORewardManager, NaiveRewardManager
from tests.config.composed import composed

ROLLOUT = "actor_rollout_ref__rollout"
ACTOR, MODEL = "actor_rollout_ref__actor", "actor_rollout_ref__model"

# Keys and values that VERL got in 0.7 to 0.10 and on its main branch, by what becomes of them.

NEW_OPTIONS: dict[str, object] = {
    f"{ROLLOUT}__multi_turn__format": "qwen3_coder",
    f"{ROLLOUT}__multi_turn__function_tool_path": "tools.py",
    f"{ROLLOUT}__agent__agent_loop_config_path": "loops.yaml",
    f"{ROLLOUT}__agent__default_agent_loop": "tool_agent",
    "algorithm__adv_estimator": "gdpo",
    "algorithm__gdpo_reward_keys": ["accuracy", "format"],
    "algorithm__gdpo_reward_weights": [1.0, 2.0],
    "algorithm__rollout_correction__rollout_is": "token",
    "algorithm__rollout_correction__rollout_is_threshold": "0.5_2.0",
    "algorithm__rollout_correction__rollout_rs": "token_k1,seq_max_k2",
    "algorithm__rollout_correction__rollout_rs_threshold": "0.6_1.6,2.5",
    f"{ACTOR}__loss_agg_mode": "token-sum",
    f"{ACTOR}__policy_loss__loss_mode": "dro",
    f"{ACTOR}__policy_loss__dro_beta": 0.1,
    f"{ROLLOUT}__n": 4,
}
OTHER_VALUES = (
    {"algorithm__adv_estimator": "optimal_token_baseline", f"{ROLLOUT}__n": 4},
    {"algorithm__adv_estimator": "tir_optimal_token_baseline", f"{ROLLOUT}__n": 4},
    {f"{ACTOR}__policy_loss__loss_mode": "dppo_tv", "trainer__logger": ["console", "trackio"]},
    {f"{ACTOR}__policy_loss__loss_mode": "dppo_kl"},
    {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "k3+"},
)
ALIASES = {
    "reward__reward_model__enable": ("reward_model.enable", True),
    "reward__reward_model__model_path": ("reward_model.model.path", "judge"),
    "reward__num_workers": ("reward_model.num_workers", 3),
    "reward__sandbox_fusion__max_concurrent": ("reward_model.sandbox_fusion.max_concurrent", 5),
    f"{MODEL}__lora__adapter_path": ("actor_rollout_ref.model.lora_adapter_path", "adapter"),
}
WITHOUT_EFFECT: dict[str, object] = {
    "trainer__use_v1": False,
    "trainer__v1__colocate_async__num_warmup_batches": 1.5,
    "trainer__v1__separate_async__num_warmup_batches": 1.5,
    "trainer__v1__separate_async__parameter_sync_step": 1,
    "trainer__v1__separate_async__hybrid_rollout__enable_switch": True,
    "trainer__v1__sampler__max_off_policy_threshold": None,
    "trainer__v1__sampler__max_off_policy_strategy": "wait",
    "trainer__v1__sampler__sync_refill_failed_groups": True,
    "transfer_queue__enable": True,
    "transfer_queue__backend__storage_backend": "MooncakeStore",
    "actor_rollout_ref__hybrid_engine": False,
    f"{ROLLOUT}__checkpoint_engine__backend": "delta",
    f"{ROLLOUT}__checkpoint_engine__custom_backend_module": "mine",
    f"{ROLLOUT}__disaggregation__enabled": True,
    f"{ROLLOUT}__full_determinism": True,
    f"{ROLLOUT}__moe_load_balance_metrics_interval": 5,
    f"{ROLLOUT}__prometheus__enable": True,
    f"{ROLLOUT}__use_preprocessed_multimodal_input": False,
    f"{ACTOR}__calculate_entropy": True,
    f"{ACTOR}__checkpoint__strict": False,
    f"{ACTOR}__fsdp_config__turbo_config__distributed__tensor_parallel_size": 2,
    f"{ACTOR}__pad_to_length": True,
    f"{MODEL}__tiled_mlp__enabled": True,
    "critic__strategy": "torchtitan",
    "global_profiler__relocate_results": True,
    "model_engine": "torchtitan",
    "data__mm_processor_kwargs__fps": 2,
    "ray_kwargs__ray_init__runtime_env__py_executable": "uv run",
}
REFUSED: dict[str, object] = {
    "distillation__enabled": True,
    "skip__rollout__enable": True,
    "skip__rollout_tq__enable": True,
    "skip__async_rollout__enable": True,
    "data__function_tool_path": "other.py",
    "reward__reward_manager__source": "importlib",
    "reward__reward_manager__module__path": "mine.py",
    "trainer__v1__trainer_mode": "separate_async",
    "trainer__v1__sampler__custom_sampler__path": "mine.py",
    f"{ROLLOUT}__enable_rollout_routing_replay": True,
    f"{ROLLOUT}__logprobs_mode": "raw_logprobs",
    f"{ROLLOUT}__quantization": "fp8",
    f"{ACTOR}__qat__enable": True,
    f"{ACTOR}__router_replay__mode": "R2",
    f"{MODEL}__lora__type": "dora",
    f"{MODEL}__mtp__enable": True,
}
RUNS = {
    f"{ROLLOUT}__name": "vllm",
    f"{ACTOR}__ppo_micro_batch_size_per_gpu": 2,
    f"{MODEL}__path": "policy",
    "trainer__n_gpus_per_node": 1,
    "trainer__device": "cpu",
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    row = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "data_source": "openai/gsm8k"}
    row["reward_model"] = {"ground_truth": "2"}  # type: ignore[assignment]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(row)] * 3))
    return file


def config(**changed: object) -> DictConfig:
    return OmegaConf.create(composed(**changed))


def test_reward_manager_of_a_composed_configuration(caplog: pytest.LogCaptureFixture) -> None:
    # Its engine, GPUs and batch sizes are not those of this machine, and do not matter here.
    manager = load_reward_manager(config(), build_tokenizer(), num_examine=0).manager
    assert type(manager) is NaiveRewardManager
    given = config(
        reward__reward_manager__name="dapo",
        reward_model__overlong_buffer={"enable": True, "len": 4, "penalty_factor": 1.0},
    )
    assert type(load_reward_manager(given, build_tokenizer()).manager) is DAPORewardManager
    assert get_custom_reward_fn(config()) is None
    assert not [record for record in caplog.records if "no effect" in record.message]


def test_data_set_of_the_section_of_a_composed_configuration(rows: Path) -> None:
    data = config(data__shuffle=False).data
    dataset = create_rl_dataset([str(rows)], data, build_tokenizer())
    assert len(dataset) == 3
    assert list(create_rl_sampler(data, dataset)) == [0, 1, 2]


def test_trainer_of_a_composed_configuration(
    rows: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    changed = {
        f"{ROLLOUT}__name": "vllm",
        f"{ROLLOUT}__tensor_model_parallel_size": 4,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref__model__path": "policy",
        "trainer__device": "cpu",
        "trainer__n_gpus_per_node": 1,
        "trainer__default_local_dir": str(tmp_path / "run"),
        "data__train_files": str(rows),
    }
    with caplog.at_level(logging.WARNING):
        trainer = RayPPOTrainer(config(**changed), build_tokenizer())
    assert trainer.config.algorithm.adv_estimator == "gae"
    assert trainer.folder == tmp_path / "run"
    about = [record.message.partition(" ")[0] for record in caplog.records]
    assert about == [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def test_trainer_refuses_what_it_cannot_do_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        RayPPOTrainer(config(distillation__enabled=True, **{f"{ROLLOUT}__quantization": "fp8"}))
    message = str(caught.value)
    for part in ("distillation.enabled=true: ", "quantization=fp8: ", "trainer.device=cuda: "):
        assert part in message, part


def check(**changed: object) -> tuple[Config, list[str]]:
    """Load a composed configuration with the launcher's rules. Return it and its notices."""
    notices: list[str] = []
    loaded = load_config(
        values=composed(**(RUNS | changed)),
        hardware=Hardware(gpus=0),
        notify=notices.append,
        verl=True,
    )
    return loaded, [text for text in notices if "rollout.name=vllm" not in text]


def value_of(loaded: object, key: str) -> object:
    for part in key.replace("__", ".").split("."):
        loaded = getattr(loaded, part)
    return list(loaded) if isinstance(loaded, tuple) else loaded


def test_new_options_of_verl_are_set(tmp_path: Path, rows: Path) -> None:
    expected = NEW_OPTIONS | {
        "algorithm__rollout_correction__rollout_rs": ["token_k1,seq_max_k2"],
        "algorithm__rollout_correction__rollout_rs_threshold": "0.6_1.6,2.5",
    }
    run = {"data__train_files": str(rows), "trainer__default_local_dir": str(tmp_path)}
    trainer = RayPPOTrainer(config(**RUNS, **run, **NEW_OPTIONS), build_tokenizer())
    for loaded in (check(**NEW_OPTIONS)[0], trainer.config):
        assert {key: value_of(loaded, key) for key in NEW_OPTIONS} == expected


@pytest.mark.parametrize("changed", OTHER_VALUES)
def test_new_values_of_verl_are_set(changed: dict[str, object]) -> None:
    loaded, notices = check(**changed)
    assert {key: value_of(loaded, key) for key in changed} == changed
    assert notices == []


def test_new_names_of_verl_are_aliases() -> None:
    loaded, notices = check(**{key: value for key, (_, value) in ALIASES.items()})
    assert {key: value_of(loaded, ours) for key, (ours, _) in ALIASES.items()} == {
        key: value for key, (_, value) in ALIASES.items()
    }
    assert sorted(notices) == sorted(
        f"{key.replace('__', '.')} is an alias of {ours}" for key, (ours, _) in ALIASES.items()
    )


def test_new_keys_of_verl_without_effect_are_named() -> None:
    keys, plain = list(WITHOUT_EFFECT), check()[0]
    # More keys at once would be counted in one notice.
    for some in (keys[i : i + MOST_OF_FILES] for i in range(0, len(keys), MOST_OF_FILES)):
        loaded, notices = check(**{key: WITHOUT_EFFECT[key] for key in some})
        named = [text.partition(" has no effect")[0] for text in notices]
        assert sorted(named) == sorted(key.replace("__", ".") for key in some)
        assert loaded == plain


def test_only_settings_of_the_critic_itself_are_named_without_one() -> None:
    grpo = {"algorithm__adv_estimator": "grpo", f"{ROLLOUT}__n": 4}
    # The critic's sizes and tokenizer are interpolations of the policy's.
    assert check(**grpo, **{f"{ACTOR}__ppo_mini_batch_size": 64})[1] == []
    assert check(**grpo, critic__ppo_mini_batch_size=64)[1] == [
        "critic.ppo_mini_batch_size has no effect: no critic is trained"
    ]


def test_new_features_of_verl_are_refused_in_one_error(rows: Path) -> None:
    given = RUNS | REFUSED
    for load in (
        lambda: check(**REFUSED),
        lambda: RayPPOTrainer(config(**given, data__train_files=str(rows)), build_tokenizer()),
    ):
        with pytest.raises(ConfigError) as caught:
            load()
        problems = str(caught.value).splitlines()[1:]
        named = [line.removeprefix("  - ").partition("=")[0] for line in problems]
        assert sorted(named) == sorted(key.replace("__", ".") for key in REFUSED)
        assert [line for line in problems if "set " not in line] == []
