"""Launch lines in the manner of VERL's and FastRL's users are accepted, or refused with reasons."""

from __future__ import annotations

import pytest

from slipstream.config.notices import Warned
from tests.config.launch_lines import LINES, REFUSED, outcome

KEYS = (
    "rollout.name=vllm",
    "rollout.name=sglang",
    "rollout.tensor_model_parallel_size=8",
    "ref.fsdp_config.param_offload=True",
    "actor.fsdp_config.param_offload=True",
    "actor.fsdp_config.optimizer_offload=True",
    "actor.ulysses_sequence_parallel_size=4",
    "reward_model.rollout.",
    "reward.reward_model.",
    "actor.checkpoint.save_contents",
    "override_config.max_position_embeddings",
    "fsdp_config.model_dtype",
    "fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_config.mixed_precision.",
    "critic.fsdp.",
    "multi_turn.format=hermes",
    "actor.profiler.",
    "global_profiler.",
    "reward_model.overlong_buffer.enable",
    "reward_model.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor",
    "data.gen_batch_size",
    "val_kwargs.temperature=0.6",
    "trainer.resume_from_path",
    "critic.ppo_micro_batch_size_per_gpu",
    "algorithm.lam=0.95",
    "algorithm.filter_groups.enable=False",
    "--config-name='ppo_megatron_trainer.yaml'",
)
"""Keys that blocked the lines of VERL's users."""


def test_the_lines_have_every_key_that_blocked_lines() -> None:
    text = "\n".join(LINES.values())
    assert [key for key in KEYS if key not in text] == []
    assert len(LINES) >= 60
    assert sum(name.startswith("dapo") for name in LINES) >= 5
    assert sum(name.startswith("fastrl") for name in LINES) >= 2
    assert len(REFUSED) <= 0.05 * len(LINES)


@pytest.mark.parametrize("name", [name for name in LINES if name not in REFUSED])
def test_a_line_is_accepted(name: str) -> None:
    assert outcome(name).error == ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_for_a_missing_feature_is_refused_with_its_key(name: str) -> None:
    error = outcome(name).error
    parts = REFUSED[name]
    assert [part for part in parts if part not in error] == []
    assert error.startswith(f"{len(parts)} settings") == (len(parts) > 1)


def test_lines_with_an_external_engine_warn() -> None:
    for name, line in LINES.items():
        warned = [notice for notice in outcome(name).notices if isinstance(notice, Warned)]
        external = any(f"rollout.name={engine}" in line for engine in ("vllm", "sglang", "trtllm"))
        megatron = "actor.strategy=megatron" in line
        assert len(warned) == external + megatron, name


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dapo_recipe", "reward_model.reward_kwargs", None),
        ("dapo_recipe", "data.train_batch_size", 512),
        ("dapo_recipe", "algorithm.filter_groups.max_num_gen_batches", 30),
        ("dapo_longer_context", "actor_rollout_ref.model.override_config", 32768),
        ("grpo_tis_of_0_6", "algorithm.rollout_correction.rollout_is", "token"),
        ("grpo_lora_new_names", "actor_rollout_ref.model.lora_rank", 64),
        ("grpo_lora_new_names", "actor_rollout_ref.model.lora_alpha", 128),
        ("grpo_no_custom_reward", "custom_reward_function.name", "compute_score"),
        ("newer_gdpo", "reward_model.reward_manager", "naive"),
        ("newer_learned_reward", "reward_model.model.path", "data/judge"),
        ("newer_learned_reward", "reward_model.enable", True),
        ("newer_two_rules", "algorithm.rollout_correction.rollout_rs", ("token_k1,seq_max_k2",)),
        ("fastrl", "speculative.bs_threshold", 32),
    ],
)
def test_lines_set_what_they_name(name: str, key: str, value: object) -> None:
    config: object = outcome(name).config
    for part in key.split("."):
        config = getattr(config, part)
    if key.endswith("reward_kwargs"):
        assert dict(config) == {  # type: ignore[call-overload]
            "overlong_buffer_cfg": {
                "enable": True,
                "len": 4096,
                "penalty_factor": 1.0,
                "log": False,
            },
            "max_resp_len": 20480,
        }
    elif key.endswith("override_config"):
        assert config.max_position_embeddings == value  # type: ignore[attr-defined]
    else:
        assert config == value
