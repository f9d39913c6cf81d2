"""Aliases of our keys, and keys of VERL that Slipstream does not have.

`RENAMED` and `RENAMED_VALUES` map other spellings to ours. `WITHOUT_EFFECT` holds keys that cannot
change a result here, such as those for memory, speed or workers. They are accepted with a notice.
`ONLY_NEUTRAL` holds keys of features that Slipstream does not have. The value that turns the
feature off is accepted; any other value is an error. `REFUSED_VALUES` holds values of our own keys
that are an error. This module does not know the tree of options. `load` calls it for each
assignment, from files and from the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slipstream.config.engines import engines_with, generates_with
from slipstream.config.tree import show
from slipstream.types import PolicyKind

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

RENAMED: dict[str, str] = {
    "algorithm.policy_loss_fn": f"{_ACTOR}.policy_loss.loss_mode",
    "algorithm.kl_ctl.type": "algorithm.kl_ctrl.type",
    "algorithm.kl_ctl.init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctl.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctl.horizon": "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctl.target_kl": "algorithm.kl_ctrl.target_kl",
    "algorithm.kl_ctrl.init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "reward_model.custom_reward_function.path": "custom_reward_function.path",
    "reward_model.custom_reward_function.name": "custom_reward_function.name",
    "reward_model.custom_reward_function.reward_kwargs": "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.path": "custom_reward_function.path",
    "reward.custom_reward_function.name": "custom_reward_function.name",
    "reward.custom_reward_function.reward_kwargs": "custom_reward_function.reward_kwargs",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.compute_score_kwargs": "reward_model.compute_score_kwargs",
    "algorithm.rollout_correction.use_policy_gradient": "algorithm.rollout_correction.loss_type",
    f"{_ACTOR}.optim.beta1": f"{_ACTOR}.optim.betas.0",
    f"{_ACTOR}.optim.beta2": f"{_ACTOR}.optim.betas.1",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.optim.beta1": "critic.optim.betas.0",
    "critic.optim.beta2": "critic.optim.betas.1",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    f"{_REF}.model.path": f"{_REF}.path",
    f"{_ROLLOUT}.max_response_length": "data.max_response_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    "data.chat_template": f"{_MODEL}.custom_chat_template",
    "data.apply_chat_template_kwargs.chat_template": f"{_MODEL}.custom_chat_template",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "speculative.train.collect_hidden_states_from_sgl": (
        "speculative.train.collect_hidden_states_from_engine"
    ),
    "speculative.train.optim.warmup_style": "speculative.train.optim.lr_scheduler_type",
    "speculative.train.vloss_weight": "speculative.train.value_weight",
    "speculative.train.ploss_weight": "speculative.train.soft_weight",
}
"""Another spelling -> ours. A trailing number is an index into a list."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    # Older versions of Slipstream called the strategy `single`, without several processes.
    f"{_ACTOR}.strategy": {"fsdp": "fsdp2", "single": "fsdp2"},
    f"{_ACTOR}.policy_loss.loss_mode": {"ppo": "vanilla", "grpo": "vanilla"},
    "algorithm.adv_estimator": {
        "reinforce++": "reinforce_plus_plus",
        "reinforce++-baseline": "reinforce_plus_plus_baseline",
        "reinforce++_baseline": "reinforce_plus_plus_baseline",
        "reinforce_plus_plus-baseline": "reinforce_plus_plus_baseline",
    },
    # VERL 0.6.1 has use_policy_gradient, true or false, instead of loss_type.
    "algorithm.rollout_correction.loss_type": {True: "reinforce", False: "ppo_clip"},
    # VERL's files write null for the default.
    f"{_MODEL}.exclude_modules": {None: ()},
    f"{_ACTOR}.optim.min_lr_ratio": {None: 0.0},
    "critic.optim.min_lr_ratio": {None: 0.0},
    "data.reward_fn_key": {"reward": "data_source"},
    "trainer.logger": {"jsonl": "file"},
}
"""Our key -> other names of its values, also inside lists."""

_SHARDS = "weights are always sharded over all processes, and gathered one layer at a time"
_RAY = (
    "Ray only starts the processes of trainer.nnodes and trainer.n_gpus_per_node, with its default "
    "settings"
)
_REWARD_MODEL = "the reward model runs in the process of the policy"
_CRITIC = "the critic is trained in the process of the policy"
_ENGINE = "it tunes an external serving engine, but the run uses a built-in engine"
_LOG_PROB = "log-probs are computed in chunks (actor.log_prob_chunk_tokens)"
_LOADING = "the training process reads the data itself"

WITHOUT_EFFECT: dict[str, str] = {
    f"{_ROLLOUT}.enable_chunked_prefill": _ENGINE,
    f"{_ROLLOUT}.disable_log_stats": _ENGINE,
    f"{_ROLLOUT}.load_format": _ENGINE,
    f"{_ROLLOUT}.layered_summon": _ENGINE,
    f"{_ROLLOUT}.multi_stage_wake_up": _ENGINE,
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _ENGINE,
    f"{_ROLLOUT}.engine_kwargs.*": _ENGINE,
    f"{_ROLLOUT}.agent.num_workers": _RAY,
    f"{_ROLLOUT}.mode": "responses are always generated concurrently; training waits for the batch",
    f"{_ROLLOUT}.calculate_log_probs": "rollouts always record log-probs",
    f"{_ROLLOUT}.log_prob_*": _LOG_PROB,
    f"{_REF}.log_prob_*": _LOG_PROB,
    f"{_REF}.strategy": "the reference policy runs in the processes of the actor",
    f"{_REF}.ulysses_sequence_parallel_size": "the reference policy runs in the processes of the "
    "actor",
    "actor_rollout_ref.hybrid_engine": "training and rollout always share a process",
    f"{_MODEL}.use_remove_padding": "sequences are always packed without padding",
    f"{_MODEL}.use_shm": _LOADING,
    f"{_MODEL}.use_liger": "the built-in decoder has its own kernels",
    f"{_MODEL}.use_fused_kernels": "the built-in decoder has its own kernels",
    f"{_MODEL}.fused_kernel_options.*": "the built-in decoder has its own kernels",
    f"{_ACTOR}.use_torch_compile": "training is not compiled",
    f"{_ACTOR}.entropy_from_logits_with_chunking": _LOG_PROB,
    f"{_ACTOR}.entropy_checkpointing": _LOG_PROB,
    f"{_ACTOR}.data_loader_seed": "trainer.seed determines the order of the data",
    f"{_ACTOR}.freeze_vision_tower": "the model has no vision tower",
    f"{_ACTOR}.optim.optimizer_impl": f"{_ACTOR}.optim.optimizer selects the optimizer",
    f"{_ACTOR}.fsdp_config.forward_prefetch": _SHARDS,
    f"{_ACTOR}.fsdp_config.fsdp_size": _SHARDS,
    f"{_ACTOR}.fsdp_config.reshard_after_forward": _SHARDS,
    f"{_ACTOR}.fsdp_config.use_orig_params": _SHARDS,
    f"{_ACTOR}.fsdp_config.wrap_policy.*": _SHARDS,
    f"{_REF}.fsdp_config.forward_prefetch": _SHARDS,
    f"{_REF}.fsdp_config.fsdp_size": _SHARDS,
    f"{_REF}.fsdp_config.reshard_after_forward": _SHARDS,
    f"{_REF}.fsdp_config.use_orig_params": _SHARDS,
    f"{_REF}.fsdp_config.wrap_policy.*": _SHARDS,
    "data.dataloader_num_workers": _LOADING,
    "data.filter_overlong_prompts_workers": _LOADING,
    "data.use_shm": _LOADING,
    "data.return_raw_chat": "samples always carry their messages",
    "data.return_raw_input_ids": "samples always carry their token ids",
    "data.return_full_prompt": "samples always carry their prompt",
    "data.return_multi_modal_inputs": "the model reads text only",
    "data.image_key": "the model reads text only",
    "data.video_key": "the model reads text only",
    "data.image_patch_size": "the model reads text only",
    "data.validation_shuffle": "the order of validation prompts does not change the result",
    "reward_model.reward_format": "the column data.reward_fn_key selects the reward function",
    "reward_model.launch_reward_fn_async": "rewards are always computed during the rollout",
    "reward_model.use_reward_loop": "rewards are always computed during the rollout",
    "reward_model.enable_resource_pool": _RAY,
    "reward_model.n_gpus_per_node": _RAY,
    "reward_model.nnodes": _RAY,
    "reward_model.strategy": _REWARD_MODEL,
    "reward_model.use_dynamic_bsz": _REWARD_MODEL,
    "reward_model.forward_max_token_len_per_gpu": _REWARD_MODEL,
    "reward_model.ulysses_sequence_parallel_size": _REWARD_MODEL,
    "reward_model.model.input_tokenizer": "it is always the policy's tokenizer",
    "reward_model.model.use_*": _REWARD_MODEL,
    "reward_model.model.fsdp_config.*": _REWARD_MODEL,
    "reward_model.model.external_lib": f"only {_MODEL}.external_lib is imported",
    "reward_model.model.trust_remote_code": "code from checkpoints is never run",
    "reward_model.profiler.*": _REWARD_MODEL,
    f"{_ACTOR}.calculate_sum_pi_squared": "it is always computed for the estimators that need it",
    f"{_ACTOR}.calculate_entropy": "the entropy is always computed",
    "critic.strategy": _CRITIC,
    "critic.rollout_n": f"the critic trains on the {_ROLLOUT}.n responses of the rollout",
    "critic.load_weight": _CRITIC,
    "critic.data_loader_seed": "trainer.seed determines the order of the data",
    "critic.nccl_timeout": _CRITIC,
    "critic.forward_*": _CRITIC,
    "critic.ppo_infer_*": _CRITIC,
    "critic.ulysses_sequence_parallel_size": _CRITIC,
    "critic.checkpoint.*": "critic and policy share a checkpoint",
    "critic.profiler.*": _CRITIC,
    "critic.engine.*": _CRITIC,
    "critic.model.fsdp_config.*": _CRITIC,
    "critic.model.use_*": _CRITIC,
    "critic.model.target_modules": "the critic trains all of its weights",
    "critic.model.exclude_modules": "the critic trains all of its weights",
    "critic.model.lora_alpha": "the critic trains all of its weights",
    "critic.model.external_lib": f"only {_MODEL}.external_lib is imported",
    "critic.model.override_config.*": _CRITIC,
    "critic.model.enable_activation_offload": _CRITIC,
    "critic.model.trust_remote_code": "code from checkpoints is never run",
    "critic.optim.optimizer_impl": "critic.optim.optimizer selects the optimizer",
    "trainer.balance_batch": "micro-batches are always balanced by tokens",
    "trainer.ray_wait_register_center_timeout": _RAY,
    "trainer.use_legacy_worker_impl": _RAY,
    "trainer.max_critic_ckpt_to_keep": "critic and policy share a checkpoint",
    "ray_kwargs.*": _RAY,
    "ray_init.*": _RAY,
    "hydra.*": "Hydra only parses the settings; trainer.default_local_dir sets the run folder",
}
"""Key or pattern -> why it has no effect.

A pattern does not apply to keys that the schema has.
"""


@dataclass(frozen=True, slots=True)
class Neutral:
    """A feature that Slipstream does not have: `values` that leave it off, and a remedy.

    If `same_as` names an option, the value of that option is accepted, too.
    """

    values: tuple[Any, ...]
    remedy: str
    same_as: str | None = None


def _off(remedy: str) -> Neutral:
    return Neutral((False, None), remedy)


def _one(feature: str) -> Neutral:
    return Neutral(
        (1, None),
        f"{feature} is not supported: processes (trainer.nnodes, trainer.n_gpus_per_node) split "
        "the batch, and each computes all layers; set it to 1",
    )


_NO_OFFLOAD = _off("offloading is not supported; set it to false")
_NO_MULTI_TURN = _off(
    "multi-turn rollouts and tools are not supported, only single turns; set it to false or null"
)
_BYTES = Neutral(
    (None,),
    "the buffer of responses is limited by bytes and age instead; set it to null, and set "
    "speculative.train.buffer_bytes and speculative.train.lookback_steps",
)

ONLY_NEUTRAL: dict[str, Neutral] = {
    f"{_ROLLOUT}.tensor_model_parallel_size": _one("tensor parallelism"),
    f"{_ROLLOUT}.data_parallel_size": Neutral(
        (1, None),
        "each process has its own engine (trainer.nnodes, trainer.n_gpus_per_node); set it to 1",
    ),
    f"{_ROLLOUT}.expert_parallel_size": _one("expert parallelism"),
    f"{_ROLLOUT}.pipeline_model_parallel_size": _one("pipeline parallelism"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": _one("sequence parallelism"),
    f"{_ACTOR}.fsdp_config.param_offload": _NO_OFFLOAD,
    f"{_ACTOR}.fsdp_config.optimizer_offload": _NO_OFFLOAD,
    f"{_ACTOR}.fsdp_config.grad_offload": _NO_OFFLOAD,
    f"{_ACTOR}.fsdp_config.offload_policy": _NO_OFFLOAD,
    f"{_REF}.fsdp_config.param_offload": _NO_OFFLOAD,
    f"{_REF}.fsdp_config.offload_policy": _NO_OFFLOAD,
    f"{_MODEL}.enable_activation_offload": _NO_OFFLOAD,
    "critic.model.lora_rank": Neutral(
        (0, None), "LoRA is not supported for the critic, which trains all weights; set it to 0"
    ),
    f"{_MODEL}.override_config": Neutral(
        ({}, None), "it is not supported; leave it out, and edit config.json of the checkpoint"
    ),
    f"{_ROLLOUT}.multi_turn.enable": _NO_MULTI_TURN,
    f"{_ROLLOUT}.multi_turn.tool_config_path": _NO_MULTI_TURN,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": _NO_MULTI_TURN,
    # With `left`, VERL 0.6 keeps the left end, and later versions remove it.
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": Neutral(
        ("middle", None), "tools are not supported; leave it out"
    ),
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": Neutral(
        (256, None), "tools are not supported; leave it out"
    ),
    f"{_ROLLOUT}.tools": _NO_MULTI_TURN,
    f"{_ROLLOUT}.interactions": _NO_MULTI_TURN,
    "tools": _NO_MULTI_TURN,
    f"{_ROLLOUT}.skip_rollout": _off(
        "replaying recorded rollouts is not supported; set it to false"
    ),
    "data.gen_batch_size": Neutral(
        (None,),
        "groups that the filter removes are replaced one by one; set it to null, and to start more "
        f"groups per step, set {_ROLLOUT}.over_sample_rate",
        same_as="data.train_batch_size",
    ),
    f"{_ACTOR}.tis_imp_ratio_cap": Neutral(
        (-1, None),
        "set it to -1, and set algorithm.rollout_correction.rollout_is=token and "
        "algorithm.rollout_correction.rollout_is_threshold instead",
    ),
    "speculative.train.buffer_max_samples": _BYTES,
    "speculative.train.data_buffer_max_size": _BYTES,
    "speculative.train.data_augment_std": Neutral(
        (0, None),
        "noise of features is uniform, with one width for all positions; set it to 0, and set "
        "speculative.train.feature_noise instead",
    ),
    "speculative.train.enable_step_barrier": _off(
        "one process trains the draft model, so there is no barrier; set it to false"
    ),
    "speculative.train.ulysses_sequence_parallel_size": _one("sequence parallelism"),
    "speculative.train.optim.total_training_steps": Neutral(
        (0, -1, None),
        "the length of the schedule follows from trainer.total_training_steps, "
        "speculative.train.training_interval_steps and speculative.train.updates_per_training; "
        "set it to 0",
    ),
    "trainer.default_hdfs_dir": _off(
        "HDFS is not supported; checkpoints are written to trainer.default_local_dir; set it to "
        "null"
    ),
    "trainer.del_local_ckpt_after_load": _off("it is not supported; set it to false"),
    "trainer.esi_redundant_time": Neutral((0, None), "it is not supported; set it to 0"),
    "global_profiler.tool": _off(
        "there is no built-in profiler; set it to null, and attach an external profiler"
    ),
}
"""Key of a feature that Slipstream does not have -> the values that leave it off."""

REFUSED_VALUES: dict[str, dict[Any, str]] = {
    f"{_ACTOR}.strategy": {
        "megatron": "Megatron is not supported; several processes train with FSDP2; set "
        f"{_ACTOR}.strategy=fsdp2"
    },
    f"{_ROLLOUT}.name": dict.fromkeys(
        ("vllm", "sglang", "trtllm"),
        "external engines are not supported; "
        f"set {engines_with(generates_with(PolicyKind.DECODER))}",
    ),
    "trainer.logger": dict.fromkeys(
        ("swanlab", "vemlp_wandb", "clearml"),
        "this logger is not supported (supported: console, file, tensorboard, wandb, mlflow, "
        "trackio); set trainer.logger=[console,file,wandb]",
    ),
    f"{_MODEL}.trust_remote_code": {
        True: "code from checkpoints is never run; "
        f"set {_MODEL}.trust_remote_code=false and use a checkpoint of an "
        "architecture that transformers has"
    },
}
"""Our key -> values that VERL supports and Slipstream does not, each with a remedy."""


KEYS = (*RENAMED, *ONLY_NEUTRAL, *WITHOUT_EFFECT)
"""All keys and patterns that are accepted although the schema does not have them."""


def _matches(key: str, table_key: str) -> bool:
    if "*" not in table_key:
        return key == table_key
    return re.fullmatch(re.escape(table_key).replace(r"\*", ".+"), key) is not None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A translated assignment: the key to set (None: set nothing), its value, notices, a problem.

    If `unless_equal` names an option, `problem` applies only if the final value of that option
    differs from `value`.
    """

    key: str | None
    value: Any
    notices: tuple[str, ...] = ()
    problem: str | None = None
    unless_equal: str | None = None


def _new_key(key: str) -> str | None:
    """Return our spelling of `key` or of a mapping that contains it; None if it is no alias."""
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED.items():
        if key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def _same_value(left: Any, right: Any) -> bool:
    """Return whether the values are equal; True does not equal 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _new_value(key: str, value: Any) -> tuple[Any, list[str]]:
    names = RENAMED_VALUES.get(key, {})
    notices: list[str] = []

    def one(item: Any) -> Any:
        for old, new in names.items():
            if _same_value(item, old):
                if old is not None:
                    notices.append(f"{key}={old} is an alias of {key}={new}")
                return new
        return item

    if isinstance(value, (list, tuple)):
        return [one(item) for item in value], notices
    return one(value), notices


def _refers_to(value: Any, key: str) -> bool:
    """Return whether `value` is an interpolation of `key`, as in VERL's files."""
    pattern = rf"\$\{{(oc\.select:)?{re.escape(key)}(,[^}}]*)?\}}"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def rewrite(key: str, value: Any, *, known: bool) -> Rewritten:
    """Translate one assignment to keys and values of the schema.

    `known` is true if the schema has the key, or a free-form mapping that contains it. A key that
    is not in any table is returned unchanged; the caller reports it.
    """
    notices: list[str] = []
    if not known:
        renamed = _new_key(key)
        if renamed is not None:
            if _refers_to(value, renamed):
                return Rewritten(None, None)
            notices.append(f"{key} is an alias of {renamed.removesuffix('.0').removesuffix('.1')}")
            key = renamed
        elif key in ONLY_NEUTRAL:
            neutral = ONLY_NEUTRAL[key]
            allowed = any(_same_value(value, one) for one in neutral.values)
            if allowed or (neutral.same_as is not None and _refers_to(value, neutral.same_as)):
                return Rewritten(None, None)
            problem = f"{key}={show(value)}: {neutral.remedy}"
            return Rewritten(None, value, problem=problem, unless_equal=neutral.same_as)
        else:
            for pattern, reason in WITHOUT_EFFECT.items():
                if _matches(key, pattern):
                    return Rewritten(None, None, (f"{key} has no effect: {reason}",))
            return Rewritten(key, value)
    value, more = _new_value(key, value)
    return Rewritten(key, value, (*notices, *more))


def refused_value(key: str, value: Any) -> str | None:
    """Return the problem and remedy for a value that only VERL supports; None for other values."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        for refused, remedy in REFUSED_VALUES.get(key, {}).items():
            if _same_value(item, refused):
                return f"{key}={show(item)}: {remedy}"
    return None
