"""Tests of aliases, keys without effect, and errors for features that only VERL has."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config import Config, Hardware, load_config
from slipstream.config.aliases import (
    ONLY_NEUTRAL,
    REFUSED_VALUES,
    RENAMED,
    RENAMED_VALUES,
    WITHOUT_EFFECT,
)
from slipstream.config.tree import options
from slipstream.errors import ConfigError

CPU = Hardware(gpus=0)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides: str) -> tuple[Config, list[str]]:
    notices: list[str] = []
    config = load_config(overrides, recipe="tiny", hardware=CPU, notify=notices.append)
    return config, notices


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("algorithm.policy_loss_fn=ppo", f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
        ("algorithm.policy_loss_fn=grpo", f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
        ("algorithm.policy_loss_fn=mine", f"{ACTOR}.policy_loss.loss_mode", "mine"),
        ("algorithm.kl_ctl.type=adaptive", "algorithm.kl_ctrl.type", "adaptive"),
        ("algorithm.kl_ctl.init_kl_coef=0.2", "algorithm.kl_ctrl.kl_coef", 0.2),
        ("reward_model.custom_reward_function.path=a.py", "custom_reward_function.path", "a.py"),
        ("reward.reward_manager.name=dapo", "reward_model.reward_manager", "dapo"),
        (f"{ACTOR}.optim.beta1=0.8", f"{ACTOR}.optim.betas", (0.8, 0.999)),
        (f"{ACTOR}.optim.beta2=0.99", f"{ACTOR}.optim.betas", (0.9, 0.99)),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        (f"{ACTOR}.optim.clip_grad=0.3", f"{ACTOR}.grad_clip", 0.3),
        (f"{ROLLOUT}.response_length=40", "data.max_response_length", 40),
        (f"{ROLLOUT}.max_response_length=40", "data.max_response_length", 40),
        (f"{ROLLOUT}.prompt_length=20", "data.max_prompt_length", 20),
        ("data.reward_fn_key=reward", "data.reward_fn_key", "data_source"),
        ("trainer.logger=jsonl", "trainer.logger", ("file",)),
        ("trainer.logger=[console,jsonl]", "trainer.logger", ("console", "file")),
        (
            "algorithm.rollout_correction.use_policy_gradient=true",
            "algorithm.rollout_correction.loss_type",
            "reinforce",
        ),
        (
            "algorithm.rollout_correction.use_policy_gradient=false",
            "algorithm.rollout_correction.loss_type",
            "ppo_clip",
        ),
        (
            "data.chat_template='{{messages}}'",
            "actor_rollout_ref.model.custom_chat_template",
            "{{messages}}",
        ),
    ],
)
def test_an_alias_sets_our_key_with_a_notice(override: str, path: str, value: object) -> None:
    config, notices = load(override)
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value
    assert notices
    assert all("is an alias of" in notice for notice in notices)


def test_a_renamed_free_form_mapping_keeps_its_keys() -> None:
    prefix = "reward_model.custom_reward_function"
    config, notices = load(f"{prefix}.path=a.py", f"+{prefix}.reward_kwargs.k=3")
    assert dict(config.custom_reward_function.reward_kwargs) == {"k": 3}
    assert len(notices) == 2


def test_aliases_of_list_items_combine_and_repeat_no_notice() -> None:
    config, notices = load(f"{ACTOR}.optim.beta1=0.8", f"{ACTOR}.optim.beta2=0.9")
    assert config.actor_rollout_ref.actor.optim.betas == (0.8, 0.9)
    _, repeated = load(f"{ACTOR}.optim.beta1=0.8", f"{ACTOR}.optim.beta1=0.7")
    assert repeated == [f"{ACTOR}.optim.beta1 is an alias of {ACTOR}.optim.betas"]
    assert len(notices) == 2


def test_an_alias_that_interpolates_our_key_sets_nothing() -> None:
    config, notices = load(
        f"{ROLLOUT}.response_length=${{data.max_response_length}}",
        f"{ROLLOUT}.prompt_length=${{oc.select:data.max_prompt_length,512}}",
    )
    assert (config.data.max_response_length, config.data.max_prompt_length) == (32, 16)
    assert notices == []


@pytest.mark.parametrize("size", ["4", "${data.train_batch_size}", "null"])
def test_gen_batch_size_is_accepted_only_if_it_equals_train_batch_size(size: str) -> None:
    line = ("data.gen_batch_size=" + size, "data.train_batch_size=4")
    assert load(*line)[0] == load("data.train_batch_size=4")[0]
    with pytest.raises(ConfigError, match=r"data.gen_batch_size=12: .*set .*over_sample_rate"):
        load("data.gen_batch_size=12", "data.train_batch_size=4")


def test_null_of_verl_equals_our_default() -> None:
    keys = (
        "actor_rollout_ref.model.exclude_modules",
        f"{ACTOR}.optim.min_lr_ratio",
        "critic.optim.min_lr_ratio",
    )
    config, notices = load(*(f"{key}=null" for key in keys))
    assert config == load()[0]
    assert notices == []


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.enable_chunked_prefill=True",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.model.use_remove_padding=True",
        "trainer.balance_batch=True",
        f"{ROLLOUT}.disable_log_stats=False",
        f"{ROLLOUT}.load_format=auto",
        f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        "critic.forward_micro_batch_size_per_gpu=4",
        "critic.model.target_modules=all-linear",
        "hydra.run.dir=outputs",
        "hydra/job_logging=none",
        "+ray_kwargs.ray_init.num_cpus=4",
    ],
)
def test_keys_without_effect_are_accepted_with_one_notice(override: str) -> None:
    config, notices = load(override)
    assert config == load()[0]
    key = override.lstrip("+").partition("=")[0].replace("/", ".")
    assert [notice.startswith(f"{key} has no effect: ") for notice in notices] == [True]


@pytest.mark.parametrize(
    ("off", "on", "remedy"),
    [
        (f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.tensor_model_parallel_size=2", "1"),
        (
            f"{ACTOR}.fsdp_config.param_offload=False",
            f"{ACTOR}.fsdp_config.param_offload=True",
            "set it to false",
        ),
        (
            f"{ROLLOUT}.multi_turn.enable=false",
            f"{ROLLOUT}.multi_turn.enable=true",
            "single turns",
        ),
        (
            f"{ROLLOUT}.multi_turn.tool_response_truncate_side=middle",
            f"{ROLLOUT}.multi_turn.tool_response_truncate_side=left",
            "tools are not supported",
        ),
        (
            f"{ROLLOUT}.multi_turn.max_tool_response_length=256",
            f"{ROLLOUT}.multi_turn.max_tool_response_length=99",
            "tools are not supported",
        ),
        ("critic.model.lora_rank=0", "critic.model.lora_rank=8", "trains all weights"),
    ],
)
def test_a_missing_feature_is_accepted_only_if_it_is_off(off: str, on: str, remedy: str) -> None:
    config, notices = load(off)
    assert config == load()[0]
    assert notices == []
    with pytest.raises(ConfigError) as caught:
        load(on)
    assert str(caught.value).startswith(on.lstrip("+").replace("True", "true"))
    assert remedy in str(caught.value)


def test_settings_of_an_untrained_critic_give_notices() -> None:
    config, notices = load("critic.ppo_epochs=2", "critic.ppo_micro_batch_size=4")
    assert (config.critic.ppo_epochs, config.critic.ppo_micro_batch_size_per_gpu) == (2, 4)
    assert "critic.ppo_epochs has no effect: no critic is trained" in notices
    assert "critic.ppo_micro_batch_size_per_gpu has no effect: no critic is trained" in notices


def test_a_parallel_size_of_true_is_an_error() -> None:
    with pytest.raises(ConfigError):
        load(f"{ROLLOUT}.tensor_model_parallel_size=true")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{ACTOR}.strategy=megatron", f"set {ACTOR}.strategy=fsdp2"),
        (f"{ROLLOUT}.name=vllm", f"set {ROLLOUT}.name=embedded"),
        (f"{ROLLOUT}.name=sglang", f"set {ROLLOUT}.name=embedded"),
        ("trainer.logger=[console,swanlab]", "set trainer.logger=[console,file,wandb]"),
        (
            "trainer.logger=vemlp_wandb",
            "(supported: console, file, tensorboard, wandb, mlflow, trackio)",
        ),
        ("actor_rollout_ref.model.trust_remote_code=true", "trust_remote_code=false"),
        ("data.trust_remote_code=true", "trust_remote_code=false"),
    ],
)
def test_values_that_only_verl_supports_are_errors_with_a_remedy(
    override: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert remedy in str(caught.value)
    assert "expected" not in str(caught.value)


@pytest.mark.parametrize("name", ["fsdp", "fsdp2", "single"])
def test_fsdp_strategies_mean_fsdp2_for_one_process_and_for_several(name: str) -> None:
    for nodes in (1, 2):
        config, _ = load(f"{ACTOR}.strategy={name}", f"trainer.nnodes={nodes}")
        assert config.actor_rollout_ref.actor.strategy == "fsdp2"


def test_a_micro_batch_size_turns_dynamic_batching_off() -> None:
    size, dynamic = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz"
    config, notices = load(f"{size}=4")
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False
    assert notices == [f"{size} is set, so {dynamic}=false"]
    config, notices = load(f"{size}=4", f"{dynamic}=true")
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True
    assert notices == [f"{size} has no effect: {dynamic}=true limits tokens instead"]
    config, notices = load(f"{size}=4", f"{dynamic}=false")
    assert notices == []


def test_a_command_line_of_verl_is_accepted() -> None:
    line = [
        "algorithm.adv_estimator=grpo",
        "data.train_files=/data/gsm8k/train.parquet",
        "data.val_files=/data/gsm8k/test.parquet",
        "data.train_batch_size=1024",
        "data.max_prompt_length=512",
        "data.max_response_length=1024",
        "data.filter_overlong_prompts=True",
        "data.truncation='error'",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.ref.fsdp_config.param_offload=False",
        "algorithm.use_kl_in_reward=False",
        "trainer.critic_warmup=0",
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=verl_grpo_example_gsm8k",
        "trainer.experiment_name=qwen2_function_rm",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=20",
        "trainer.test_freq=5",
        "trainer.total_epochs=15",
    ]
    notices: list[str] = []
    config = load_config(line, hardware=Hardware(gpus=1), notify=notices.append)
    assert config.data.train_batch_size == 1024
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 40
    assert config.trainer.default_local_dir == (
        "checkpoints/verl_grpo_example_gsm8k/qwen2_function_rm"
    )
    assert [notice.split()[0].rpartition(".")[2] for notice in notices] == [
        "use_remove_padding",
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size_per_gpu",
        "ppo_micro_batch_size_per_gpu",
    ]


def test_one_error_lists_all_unsupported_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            f"{ROLLOUT}.multi_turn.enable=True",
            "actor_rollout_ref.model.enable_activation_offload=True",
        )
    assert str(caught.value).startswith("3 settings cannot be used:")
    with pytest.raises(ConfigError) as caught:
        load(f"{ROLLOUT}.name=vllm", "trainer.logger=[clearml]", f"{ACTOR}.strategy=megatron")
    assert str(caught.value).startswith("3 settings cannot be used:")


def test_the_tables_of_aliases_agree_with_the_schema() -> None:
    known = set(options())
    for old, new in RENAMED.items():
        assert old not in known
        assert new.removesuffix(".0").removesuffix(".1") in known
    assert known >= set(RENAMED_VALUES) | set(REFUSED_VALUES)
    assert not known & (set(ONLY_NEUTRAL) | set(WITHOUT_EFFECT))
    assert not set(ONLY_NEUTRAL) & set(WITHOUT_EFFECT)
    assert not set(RENAMED) & (set(ONLY_NEUTRAL) | set(WITHOUT_EFFECT))
