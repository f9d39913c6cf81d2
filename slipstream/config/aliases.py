"""Other spellings of our keys, and keys of VERL that have nothing to act on here.

`RENAMED` and `RENAMED_VALUES` map other spellings to ours. `WITHOUT_EFFECT` holds keys that cannot
change a result (memory, speed, workers that do not exist here): accepted with a notice.
`ONLY_NEUTRAL` holds keys whose feature is absent: accepted at the value that asks for nothing,
refused with the remedy otherwise. `REFUSED_VALUES` does the same for values of our own keys. Knows
keys and values, not the tree they go into. Called by `load` for each assignment, from files and
command line alike.
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
    # `single` was what one process had to say before there were several.
    f"{_ACTOR}.strategy": {"fsdp": "fsdp2", "single": "fsdp2"},
    f"{_ACTOR}.policy_loss.loss_mode": {"ppo": "vanilla", "grpo": "vanilla"},
    "algorithm.adv_estimator": {
        "reinforce++": "reinforce_plus_plus",
        "reinforce++-baseline": "reinforce_plus_plus_baseline",
        "reinforce++_baseline": "reinforce_plus_plus_baseline",
        "reinforce_plus_plus-baseline": "reinforce_plus_plus_baseline",
    },
    # The first one's values: VERL 0.6.1's use_policy_gradient.
    "algorithm.rollout_correction.loss_type": {True: "reinforce", False: "ppo_clip"},
    # VERL's files have null where nothing is asked for.
    f"{_MODEL}.exclude_modules": {None: ()},
    f"{_ACTOR}.optim.min_lr_ratio": {None: 0.0},
    "critic.optim.min_lr_ratio": {None: 0.0},
    "data.reward_fn_key": {"reward": "data_source"},
    "trainer.logger": {"jsonl": "file"},
}
"""Our key -> other names of its values, also inside lists."""

_SLICES = "of several processes each holds a slice of every layer, gathered a layer at a time"
_RAY = (
    "Ray comes in for the processes of trainer.nnodes and trainer.n_gpus_per_node alone, with its "
    "own settings"
)
_REWARD_MODEL = "the reward model is computed in this process, beside the policy"
_CRITIC = "the critic is trained in this process, beside the policy"
_ENGINE = "it tunes an external serving engine, and the run uses its own"
_LOG_PROB = "log-probabilities are computed in chunks (actor.log_prob_chunk_tokens)"
_LOADING = "data is read in the training process"

WITHOUT_EFFECT: dict[str, str] = {
    f"{_ROLLOUT}.enable_chunked_prefill": _ENGINE,
    f"{_ROLLOUT}.disable_log_stats": _ENGINE,
    f"{_ROLLOUT}.load_format": _ENGINE,
    f"{_ROLLOUT}.layered_summon": _ENGINE,
    f"{_ROLLOUT}.multi_stage_wake_up": _ENGINE,
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _ENGINE,
    f"{_ROLLOUT}.engine_kwargs.*": _ENGINE,
    f"{_ROLLOUT}.agent.num_workers": _RAY,
    f"{_ROLLOUT}.mode": "responses are generated at the same time, and trained on batch by batch",
    f"{_ROLLOUT}.calculate_log_probs": "rollouts always record log-probabilities",
    f"{_ROLLOUT}.log_prob_*": _LOG_PROB,
    f"{_REF}.log_prob_*": _LOG_PROB,
    f"{_REF}.strategy": "the reference policy runs where the actor runs",
    f"{_REF}.ulysses_sequence_parallel_size": "the reference policy runs where the actor runs",
    "actor_rollout_ref.hybrid_engine": "training and rollout share the process",
    f"{_MODEL}.use_remove_padding": "sequences are always packed without padding",
    f"{_MODEL}.use_shm": _LOADING,
    f"{_MODEL}.use_liger": "the built-in decoder has its own kernels",
    f"{_MODEL}.use_fused_kernels": "the built-in decoder has its own kernels",
    f"{_MODEL}.fused_kernel_options.*": "the built-in decoder has its own kernels",
    f"{_ACTOR}.use_torch_compile": "training is not compiled",
    f"{_ACTOR}.entropy_from_logits_with_chunking": _LOG_PROB,
    f"{_ACTOR}.entropy_checkpointing": _LOG_PROB,
    f"{_ACTOR}.data_loader_seed": "order comes from trainer.seed",
    f"{_ACTOR}.freeze_vision_tower": "the model has no vision tower",
    f"{_ACTOR}.optim.num_cycles": "cosine is a half period here, num_cycles 0.5",
    f"{_ACTOR}.optim.optimizer_impl": "the optimizer is picked by name",
    f"{_ACTOR}.fsdp_config.forward_prefetch": _SLICES,
    f"{_ACTOR}.fsdp_config.fsdp_size": _SLICES,
    f"{_ACTOR}.fsdp_config.reshard_after_forward": _SLICES,
    f"{_ACTOR}.fsdp_config.use_orig_params": _SLICES,
    f"{_ACTOR}.fsdp_config.wrap_policy.*": _SLICES,
    f"{_REF}.fsdp_config.forward_prefetch": _SLICES,
    f"{_REF}.fsdp_config.fsdp_size": _SLICES,
    f"{_REF}.fsdp_config.reshard_after_forward": _SLICES,
    f"{_REF}.fsdp_config.use_orig_params": _SLICES,
    f"{_REF}.fsdp_config.wrap_policy.*": _SLICES,
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
    "data.validation_shuffle": "the order of validation changes no result",
    "reward_model.reward_format": "the column data.reward_fn_key picks the reward function",
    "reward_model.launch_reward_fn_async": "rewards are always computed while rollouts go on",
    "reward_model.use_reward_loop": "rewards are always computed while rollouts go on",
    "reward_model.enable_resource_pool": _RAY,
    "reward_model.n_gpus_per_node": _RAY,
    "reward_model.nnodes": _RAY,
    "reward_model.strategy": _REWARD_MODEL,
    "reward_model.use_dynamic_bsz": _REWARD_MODEL,
    "reward_model.forward_max_token_len_per_gpu": _REWARD_MODEL,
    "reward_model.ulysses_sequence_parallel_size": _REWARD_MODEL,
    "reward_model.model.input_tokenizer": "the policy's tokenizer is known",
    "reward_model.model.use_*": _REWARD_MODEL,
    "reward_model.model.fsdp_config.*": _REWARD_MODEL,
    "reward_model.model.external_lib": f"{_MODEL}.external_lib is imported",
    "reward_model.model.trust_remote_code": "code from checkpoints is never run",
    "reward_model.profiler.*": _REWARD_MODEL,
    f"{_ACTOR}.calculate_sum_pi_squared": "it is computed for the estimators that need it",
    f"{_ACTOR}.calculate_entropy": "the entropy is always computed",
    "critic.strategy": _CRITIC,
    "critic.rollout_n": "the critic sees the responses of the rollout",
    "critic.load_weight": _CRITIC,
    "critic.data_loader_seed": "order comes from trainer.seed",
    "critic.nccl_timeout": _CRITIC,
    "critic.forward_*": _CRITIC,
    "critic.ppo_infer_*": _CRITIC,
    "critic.ulysses_sequence_parallel_size": _CRITIC,
    "critic.checkpoint.*": "critic and policy are in one checkpoint",
    "critic.profiler.*": _CRITIC,
    "critic.engine.*": _CRITIC,
    "critic.model.fsdp_config.*": _CRITIC,
    "critic.model.use_*": _CRITIC,
    "critic.model.target_modules": "the critic trains all of its weights",
    "critic.model.exclude_modules": "the critic trains all of its weights",
    "critic.model.lora_alpha": "the critic trains all of its weights",
    "critic.model.external_lib": f"{_MODEL}.external_lib is imported",
    "critic.model.override_config.*": _CRITIC,
    "critic.model.enable_activation_offload": _CRITIC,
    "critic.model.trust_remote_code": "code from checkpoints is never run",
    "critic.optim.num_cycles": "cosine is a half period here, num_cycles 0.5",
    "critic.optim.optimizer_impl": "the optimizer is picked by name",
    "trainer.balance_batch": "micro-batches are always balanced by tokens",
    "trainer.ray_wait_register_center_timeout": _RAY,
    "trainer.use_legacy_worker_impl": _RAY,
    "trainer.max_critic_ckpt_to_keep": "critic and policy are in one checkpoint",
    "ray_kwargs.*": _RAY,
    "ray_init.*": _RAY,
    "hydra.*": "the run folder is trainer.default_local_dir",
}
"""Key or pattern -> why it changes nothing. The schema's own keys come first: one that a pattern
matches, too, does not come here."""


@dataclass(frozen=True, slots=True)
class Neutral:
    """Values of an absent feature that ask for nothing, and what to do instead of others. Nor does
    the value of the option `same_as`."""

    values: tuple[Any, ...]
    remedy: str
    same_as: str | None = None


def _off(remedy: str) -> Neutral:
    return Neutral((False, None), remedy)


def _one(what: str) -> Neutral:
    return Neutral(
        (1, None),
        f"{what} is not in this version, where every process has all layers and rows of its own "
        "(trainer.nnodes, trainer.n_gpus_per_node); set it to 1",
    )


_NO_OFFLOAD = _off("this version moves nothing off the device; set it to false")
_NO_MULTI_TURN = _off("this version rolls out single turns; set it to false or null")
_BYTES = Neutral(
    (None,),
    "responses to train on are bounded in bytes and in age; set speculative.train.buffer_bytes and "
    "speculative.train.lookback_steps instead",
)

ONLY_NEUTRAL: dict[str, Neutral] = {
    f"{_ROLLOUT}.tensor_model_parallel_size": _one("tensor parallelism"),
    f"{_ROLLOUT}.data_parallel_size": Neutral(
        (1, None),
        "there are as many engines as processes (trainer.nnodes, trainer.n_gpus_per_node); set it "
        "to 1",
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
    "critic.model.lora_rank": Neutral((0, None), "the critic trains all weights; set it to 0"),
    f"{_MODEL}.override_config": Neutral(({}, None), "edit the checkpoint's config.json instead"),
    f"{_ROLLOUT}.multi_turn.enable": _NO_MULTI_TURN,
    f"{_ROLLOUT}.multi_turn.tool_config_path": _NO_MULTI_TURN,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": _NO_MULTI_TURN,
    # VERL 0.6 keeps the left end for `left`, later versions cut it.
    f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": Neutral(
        ("middle", None), "there are no tools, whose responses could be cut; leave it out"
    ),
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": Neutral(
        (256, None), "there are no tools, whose responses could be cut; leave it out"
    ),
    f"{_ROLLOUT}.tools": _NO_MULTI_TURN,
    f"{_ROLLOUT}.interactions": _NO_MULTI_TURN,
    "tools": _NO_MULTI_TURN,
    f"{_ROLLOUT}.skip_rollout": _off("recorded rollouts cannot be replayed; set it to false"),
    "data.gen_batch_size": Neutral(
        (None,),
        f"groups that are filtered out are replaced one by one; set {_ROLLOUT}.over_sample_rate to "
        "begin with more, and this to null",
        same_as="data.train_batch_size",
    ),
    f"{_ACTOR}.tis_imp_ratio_cap": Neutral(
        (-1, None),
        "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold instead",
    ),
    "speculative.train.buffer_max_samples": _BYTES,
    "speculative.train.data_buffer_max_size": _BYTES,
    "speculative.train.data_augment_std": Neutral(
        (0, None),
        "noise is uniform and of one width for all lengths; set speculative.train.feature_noise "
        "instead",
    ),
    "speculative.train.enable_step_barrier": _off(
        "the draft model learns in one process, which waits for no other; set it to false"
    ),
    "speculative.train.ulysses_sequence_parallel_size": _one("sequence parallelism"),
    "speculative.train.optim.total_training_steps": Neutral(
        (0, -1, None),
        "the schedule spans the updates that trainer.total_training_steps, "
        "training_interval_steps and updates_per_training come to; set it to 0",
    ),
    "trainer.default_hdfs_dir": _off("checkpoints go to trainer.default_local_dir; set it to null"),
    "trainer.del_local_ckpt_after_load": _off("set it to false"),
    "trainer.esi_redundant_time": Neutral((0, None), "set it to 0"),
    "global_profiler.tool": _off("profile the process from outside; set it to null"),
}
"""Key of a feature that this version does not have -> the values that leave it off."""

REFUSED_VALUES: dict[str, dict[Any, str]] = {
    f"{_ACTOR}.strategy": {
        "megatron": f"several processes train by FSDP2 in this version; set {_ACTOR}.strategy=fsdp2"
    },
    f"{_ROLLOUT}.name": dict.fromkeys(
        ("vllm", "sglang", "trtllm"),
        "external engines are not in this version; "
        f"set {engines_with(generates_with(PolicyKind.DECODER))}",
    ),
    "trainer.logger": dict.fromkeys(
        ("swanlab", "vemlp_wandb", "clearml"),
        "this version logs to console, file, tensorboard, wandb, mlflow and trackio; set "
        "trainer.logger=[console,file,wandb]",
    ),
    f"{_MODEL}.trust_remote_code": {
        True: "code from checkpoints is never run; "
        f"set {_MODEL}.trust_remote_code=false and use a checkpoint of an "
        "architecture that transformers has"
    },
}
"""Our key -> values that VERL knows and this version does not, each with the remedy."""


def _matches(key: str, table_key: str) -> bool:
    if "*" not in table_key:
        return key == table_key
    return re.fullmatch(re.escape(table_key).replace(r"\*", ".+"), key) is not None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of one assignment: the key to set (null: nothing), its value, and remarks.
    `problem` is none where the option `unless_equal` has this value in the end."""

    key: str | None
    value: Any
    notices: tuple[str, ...] = ()
    problem: str | None = None
    unless_equal: str | None = None


def _new_key(key: str) -> str | None:
    """Our spelling of `key`, also of a key below a renamed free-form mapping."""
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED.items():
        if key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def _same_value(left: Any, right: Any) -> bool:
    """Equal, and not a truth value taken for a number."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _new_value(key: str, value: Any) -> tuple[Any, list[str]]:
    names = RENAMED_VALUES.get(key, {})
    notices: list[str] = []

    def one(item: Any) -> Any:
        for old, new in names.items():
            if _same_value(item, old):
                if old is not None:
                    notices.append(f"{key}={old} is taken as {key}={new}")
                return new
        return item

    if isinstance(value, (list, tuple)):
        return [one(item) for item in value], notices
    return one(value), notices


def _refers_to(value: Any, key: str) -> bool:
    """Whether `value` is an interpolation of `key`, as VERL's files write inherited values."""
    pattern = rf"\$\{{(oc\.select:)?{re.escape(key)}(,[^}}]*)?\}}"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def rewrite(key: str, value: Any, *, known: bool) -> Rewritten:
    """Translate one assignment into the schema's terms.

    `known` says that the schema has the key, or a free-form mapping above it. An unknown key comes
    back unchanged, for the caller to refuse.
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
    """Why a value that VERL knows is refused here, with the remedy; null where it is not."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        for refused, remedy in REFUSED_VALUES.get(key, {}).items():
            if _same_value(item, refused):
                return f"{key}={show(item)}: {remedy}"
    return None
