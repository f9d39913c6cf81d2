"""Tests of aliases, keys without effect, and errors for features that only VERL has."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config import Config, Hardware, load_config
from slipstream.config.aliases import RENAMED, RENAMED_VALUES
from slipstream.config.engines import SERVED
from slipstream.config.notices import Warned
from slipstream.config.tree import options
from slipstream.config.verl_keys import (
    ONLY_NEUTRAL,
    REFUSED_VALUES,
    TAKEN_VALUES,
    WITHOUT_EFFECT,
)
from slipstream.errors import ConfigError

CPU = Hardware(gpus=0)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides: str, verl: bool = False) -> tuple[Config, list[str]]:
    notices: list[str] = []
    config = load_config(overrides, recipe="tiny", hardware=CPU, notify=notices.append, verl=verl)
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
def test_gen_batch_size_may_equal_train_batch_size(size: str) -> None:
    line = ("data.gen_batch_size=" + size, "data.train_batch_size=4")
    assert load(*line, verl=True) == load("data.train_batch_size=4", verl=True)


def test_without_a_filter_gen_batch_size_is_the_batch() -> None:
    config, notices = load("data.gen_batch_size=12", "data.train_batch_size=4")
    assert config == load("data.train_batch_size=12")[0]
    assert ["data.gen_batch_size=12: " in notice for notice in notices] == [True]


def test_with_a_filter_gen_batch_size_only_scales_the_limit() -> None:
    filtered = ("data.train_batch_size=4", "algorithm.filter_groups.enable=true")
    limit = "algorithm.filter_groups.max_num_gen_batches"
    config, notices = load(*filtered, "data.gen_batch_size=10", f"{limit}=3")
    # Three batches of 10 prompts are 30 prompts: 7.5 batches of 4.
    assert config == load(*filtered, f"{limit}=8")[0]
    assert [notice.startswith("data.gen_batch_size=10 has no effect") for notice in notices] == [
        True
    ]


@pytest.mark.parametrize("size", ["0", "x", "true", "2.5"])
def test_gen_batch_size_is_a_count(size: str) -> None:
    with pytest.raises(ConfigError, match=r"data.gen_batch_size=.*set it to"):
        load(f"data.gen_batch_size={size}")


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
        f"{ROLLOUT}.enable_chunked_prefill=False",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.checkpoint.save_contents=[model]",
        f"{ACTOR}.profiler.enable=True",
        "global_profiler.tool=nsys",
        "critic.fsdp.param_offload=True",
        "reward_model.rollout.name=vllm",
        "reward.reward_model.rollout.tensor_model_parallel_size=4",
        "actor_rollout_ref.model.enable_activation_offload=True",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{ROLLOUT}.multi_turn.use_inference_chat_template=True",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=disable",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
        "actor_rollout_ref.model.use_liger=True",
        "trainer.balance_batch=False",
        f"{ROLLOUT}.disable_log_stats=False",
        f"{ROLLOUT}.load_format=auto",
        "critic.forward_micro_batch_size_per_gpu=4",
        "critic.model.target_modules=[q_proj]",
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
        (
            f"{ROLLOUT}.quantization=null",
            f"{ROLLOUT}.quantization=fp8",
            "set it to null",
        ),
        (f"{ACTOR}.qat.enable=False", f"{ACTOR}.qat.enable=True", "set it to false"),
        (
            "trainer.v1.trainer_mode=sync",
            "trainer.v1.trainer_mode=separate_async",
            "set sync",
        ),
        (
            "data.tool_config_path=null",
            "data.tool_config_path=tools.yaml",
            "multi_turn.tool_config_path instead",
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


@pytest.mark.parametrize("size", ["true", "0", "-2", "1.5"])
def test_a_parallel_size_is_a_count(size: str) -> None:
    with pytest.raises(ConfigError, match=r"_parallel_size=.*set it to a count"):
        load(f"{ROLLOUT}.data_parallel_size={size}")
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: expected an integer"):
        load(f"{ROLLOUT}.tensor_model_parallel_size={size}")


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=strict",
        f"{ROLLOUT}.load_format=dummy",
        f"{ACTOR}.fsdp_config.param_offload=False",
        f"{ACTOR}.fsdp_config.model_dtype=fp32",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
        "actor_rollout_ref.model.use_remove_padding=True",
        "critic.fsdp.fsdp_size=-1",
        "reward.reward_model.rollout.load_format=auto",
        "trainer.balance_batch=True",
        "ray_kwargs.ray_init.num_cpus=null",
    ],
)
def test_a_default_of_verl_gives_no_notice(override: str) -> None:
    assert load(override) == load()


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_a_line_of_verl_generates_with_the_embedded_engine_and_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in SERVED.values():
        monkeypatch.delenv(variable, raising=False)
    config, notices = load(f"{ROLLOUT}.name={name}", verl=True)
    assert config == load()[0]
    (notice,) = notices
    assert isinstance(notice, Warned)
    assert f"{ROLLOUT}.name={name} " in notice
    assert f"{ROLLOUT}.name=embedded" in notice
    assert name == "trtllm" or SERVED[name] in notice


@pytest.mark.parametrize("name", SERVED)
def test_a_line_of_verl_generates_with_an_engine_that_is_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVED[name], "/opt/engine/bin/python")
    line = [f"{ROLLOUT}.name={name}", f"+{ROLLOUT}.engine_kwargs.{name}.swap_space=4"]
    config, notices = load(*line, verl=True)
    assert config.actor_rollout_ref.rollout.name == name
    assert config.actor_rollout_ref.rollout.engine_kwargs[name] == {"swap_space": 4}
    assert notices == []


def test_options_of_servers_have_no_effect_with_another_engine() -> None:
    key = f"{ROLLOUT}.engine_kwargs.vllm.swap_space"
    config, notices = load(f"+{key}=4", verl=True)
    assert config == load()[0]
    assert [f"{ROLLOUT}.engine_kwargs=" in notice for notice in notices] == [True]
    for override in (f"{key}=4", f"{ROLLOUT}.server.replicas=2"):
        with pytest.raises(ConfigError, match=rf"set {ROLLOUT}\.name=vllm"):
            load(override)


def test_a_run_that_uses_running_servers_starts_none() -> None:
    line = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server.urls=[http://localhost:8000]"]
    load(*line)
    with pytest.raises(ConfigError, match=r"server\.replicas=2 has no effect with .*urls"):
        load(*line, f"{ROLLOUT}.server.replicas=2")


@pytest.mark.parametrize(
    ("override", "used"),
    [
        (f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy=fsdp2"),
        ("trainer.device=npu", "trainer.device=auto"),
    ],
)
def test_a_line_of_verl_for_other_hardware_or_trainers_warns(override: str, used: str) -> None:
    config, notices = load(override, verl=True)
    assert config == load(used)[0]
    assert [isinstance(notice, Warned) for notice in notices] == [True]
    assert f"({used})" in notices[0]
    with pytest.raises(ConfigError, match=used):
        load(override)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{ACTOR}.strategy=megatron", f"set {ACTOR}.strategy=fsdp2"),
        (f"{ROLLOUT}.name=trtllm", f"set {ROLLOUT}.name=embedded"),
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
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size_per_gpu",
        "ppo_micro_batch_size_per_gpu",
    ]


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (("loss_mode=sapo", "token-mean"), "sapo"),
        (("loss_mode=geo_mean", "seq-mean-token-mean"), "geo_mean"),
        (("loss_mode=gspo", "token-mean"), "gspo"),
        (("loss_mode=gspo", None), "gspo"),
        (("loss_mode=gspo", "seq-mean-token-mean"), None),
        (("loss_mode=sapo", "seq-mean-token-mean"), None),
        (("loss_mode=sapo", None), None),
        (("loss_mode=vanilla", "seq-mean-token-mean"), None),
    ],
)
def test_losses_with_an_aggregation_of_their_own(
    overrides: tuple[str, str | None], mode: str | None
) -> None:
    loss, aggregation = overrides
    line = [f"{ACTOR}.policy_loss.{loss}"]
    line += [] if aggregation is None else [f"{ACTOR}.loss_agg_mode={aggregation}"]
    _, notices = load(*line, verl=True)
    about = [notice for notice in notices if f"{ACTOR}.loss_agg_mode=" in notice]
    assert len(about) == (mode is not None)
    assert [f"loss_mode={mode}," in notice for notice in about] in ([], [True])
    if mode == "gspo":
        setting = f"{ACTOR}.policy_loss.gspo_uses_loss_agg_mode=true"
        assert setting in about[0]
        assert load(*line, setting, verl=True)[1] == []


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ((f"{ACTOR}.optim.min_lr=2e-5",), (f"{ACTOR}.optim.min_lr_ratio=0.2",)),
        ((f"{ACTOR}.optim.min_lr=0",), ()),
        ((f"{ACTOR}.tis_imp_ratio_cap=-1",), ()),
        (
            (f"{ACTOR}.tis_imp_ratio_cap=5",),
            (
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=5",
            ),
        ),
        (
            ("actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.model.lora.alpha=32"),
            ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=32"),
        ),
        (("actor_rollout_ref.model.lora.rank=0", "actor_rollout_ref.model.lora.alpha=32"), ()),
        (
            ("reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True"),
            (
                "reward_model.reward_manager=dapo",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
                "+reward_model.reward_kwargs.max_resp_len=32",
            ),
        ),
        (("reward_model.overlong_buffer.enable=False", "reward_model.overlong_buffer.len=4"), ()),
        (("reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=4"), ()),
        (("actor_rollout_ref.model.lora_alpha=0",), ("actor_rollout_ref.model.lora_alpha=0",)),
        # Four processes share a sequence of 48 tokens.
        (
            (f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=12"),
            (f"{ACTOR}.ppo_max_token_len_per_gpu=48",),
        ),
        (
            (f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=64"),
            (f"{ACTOR}.ppo_max_token_len_per_gpu=64",),
        ),
    ],
)
def test_keys_of_verl_that_combine(overrides: tuple[str, ...], same: tuple[str, ...]) -> None:
    schedule = (f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.optim.lr_scheduler_type=linear")
    assert load(*schedule, *overrides, verl=True)[0] == load(*schedule, *same)[0]


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{ACTOR}.optim.min_lr=1", "optim.lr=0.0001"),
        (f"{ACTOR}.optim.min_lr=low", "set it to a number"),
        (f"{ACTOR}.tis_imp_ratio_cap=0", "or to -1"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg=5", "overlong_buffer_cfg.enable=true"),
    ],
)
def test_keys_of_verl_that_combine_are_checked(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override, verl=True)
    assert str(caught.value).startswith(override)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("verl", [False, True])
def test_an_interpolation_with_a_syntax_error_is_an_error(verl: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer\.experiment_name: .*such as \$\{trainer\.seed"
    ):
        load("trainer.experiment_name='a${'", verl=verl)


def test_a_cap_of_tis_has_no_effect_with_a_rollout_correction() -> None:
    corrected = "algorithm.rollout_correction.rollout_is=sequence"
    config, (notice,) = load(corrected, f"{ACTOR}.tis_imp_ratio_cap=5", verl=True)
    assert config == load(corrected)[0]
    assert notice.startswith(f"{ACTOR}.tis_imp_ratio_cap=5 has no effect")
    assert corrected in notice


@pytest.mark.parametrize(("alpha", "notices"), [(32, 0), (8, 1)])
def test_an_alpha_without_an_adapter_gives_a_notice(alpha: int, notices: int) -> None:
    config, found = load(f"actor_rollout_ref.model.lora.alpha={alpha}", verl=True)
    assert config == load()[0]
    assert len(found) == notices
    assert all("model.lora.alpha=8 has no effect" in notice for notice in found)


def test_a_token_budget_below_a_shared_sequence_is_an_error() -> None:
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu=11"
    with pytest.raises(ConfigError, match="ppo_max_token_len_per_gpu=48"):
        load(budget, f"{ACTOR}.ulysses_sequence_parallel_size=4", verl=True)


def test_an_adapter_without_alpha_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"lora_alpha=0 .*set .*lora_alpha=4"):
        load("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=0")


def test_one_error_lists_all_unsupported_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            f"{ACTOR}.qat.enable=True",  # a missing feature
            f"{ROLLOUT}.name=trtllm",  # a value that only VERL supports
            "trainer.nodes=2",  # no such option
            "data.train_batch_size=many",  # the wrong type
            f"{ACTOR}.clip_ratio_c=0.5",  # an impossible value
            "algorithm.lam=0.9",  # no effect
            f"{ACTOR}.grad_clip=${{trainer.nothing}}",  # an interpolation of nothing
        )
    message = str(caught.value)
    assert message.startswith("7 settings cannot be used:")
    for part in (
        "qat.enable=true: ",
        f"{ROLLOUT}.name=trtllm: ",
        "trainer.nodes: ",
        "data.train_batch_size: ",
        "clip_ratio_c=0.5: ",
        "algorithm.lam=0.9 has no effect",
        "trainer.nothing",
    ):
        assert part in message, part


def test_an_option_of_the_wrong_type_breaks_no_rule() -> None:
    with pytest.raises(ConfigError) as caught:
        load("data.max_response_length=long", f"{ROLLOUT}.max_model_len=20")
    assert "settings cannot be used" not in str(caught.value)


def test_on_a_line_of_verl_options_without_effect_are_notices() -> None:
    overrides = (
        "algorithm.lam=0.95",
        f"{ROLLOUT}.val_kwargs.temperature=0.7",
        f"{ROLLOUT}.val_kwargs.n=4",
        "trainer.resume_from_path=old",
        "algorithm.filter_groups.max_num_gen_batches=10",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.num_cycles=2",
        f"{ACTOR}.loss_scale_factor=100",
        f"{ACTOR}.policy_loss.kl_cov_ratio=0.02",
        f"{ACTOR}.tau_pos=2.0",
        "actor_rollout_ref.model.lora_alpha=32",
        "actor_rollout_ref.ref.path=other",
        "+custom_reward_function.reward_kwargs.k=3",
    )
    config, notices = load(*overrides, verl=True)
    assert config == load()[0]
    assert len(notices) == len(overrides)
    for override in overrides:
        key = override.lstrip("+").partition("=")[0].removesuffix(".k")
        assert any(notice.startswith(key) for notice in notices), override
        with pytest.raises(ConfigError):
            load(override)


def test_the_tables_of_aliases_agree_with_the_schema() -> None:
    known = set(options())
    free_form = {key for key, option in options().items() if option.free_form}
    for old, new in RENAMED.items():
        assert old not in known
        assert new.removesuffix(".0").removesuffix(".1") in known or (
            new.rpartition(".")[0] in free_form
        )
    assert known >= set(RENAMED_VALUES) | set(REFUSED_VALUES)
    assert set(TAKEN_VALUES) <= set(REFUSED_VALUES)
    assert not known & (set(ONLY_NEUTRAL) | set(WITHOUT_EFFECT))
    assert not set(ONLY_NEUTRAL) & set(WITHOUT_EFFECT)
    assert not set(RENAMED) & (set(ONLY_NEUTRAL) | set(WITHOUT_EFFECT))
