"""Translates assignments in VERL's spelling to ours.

`RENAMED` and `RENAMED_VALUES` map other spellings to ours. `verl_keys` has the keys that Slipstream
does not have. This module does not know the tree of options. `load` calls it for each assignment,
from files and from the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slipstream.config.engines import ENGINE_KEY, SERVED, is_here
from slipstream.config.tree import is_count, show
from slipstream.config.verl_defaults import is_default, same_value
from slipstream.config.verl_keys import (
    ONLY_NEUTRAL,
    PARALLEL_SIZES,
    REFUSED_VALUES,
    TAKEN_VALUES,
    WITHOUT_EFFECT,
    find,
)

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
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.model.path": "reward_model.model.path",
    "reward_model.model_path": "reward_model.model.path",
    "reward_model.sandbox_fusion_url": "reward_model.sandbox_fusion.url",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward_manager.name": "reward_model.reward_manager",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "algorithm.rollout_correction.use_policy_gradient": "algorithm.rollout_correction.loss_type",
    f"{_ACTOR}.optim.beta1": f"{_ACTOR}.optim.betas.0",
    f"{_ACTOR}.optim.beta2": f"{_ACTOR}.optim.betas.1",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    # Names of VERL's engines for Torchtitan.
    f"{_ACTOR}.optim.name": f"{_ACTOR}.optim.optimizer",
    f"{_ACTOR}.optim.decay_type": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.min_lr_factor": f"{_ACTOR}.optim.min_lr_ratio",
    "critic.optim.name": "critic.optim.optimizer",
    "critic.optim.decay_type": "critic.optim.lr_scheduler_type",
    "critic.optim.min_lr_factor": "critic.optim.min_lr_ratio",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.override_optimizer_config.eps": f"{_ACTOR}.optim.eps",
    f"{_ACTOR}.use_token_level_loss": f"{_ACTOR}.loss_agg_mode",
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.optim.beta1": "critic.optim.betas.0",
    "critic.optim.beta2": "critic.optim.betas.1",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.lr_decay_style": "critic.optim.lr_scheduler_type",
    "critic.optim.override_optimizer_config.eps": "critic.optim.eps",
    "sft.optim.override_optimizer_config.eps": "sft.optim.eps",
    f"{_REF}.model.path": f"{_REF}.path",
    f"{_ROLLOUT}.max_response_length": "data.max_response_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    "data.chat_template": f"{_MODEL}.custom_chat_template",
    "data.apply_chat_template_kwargs.chat_template": f"{_MODEL}.custom_chat_template",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    f"{_MODEL}.override_config.model_config.max_position_embeddings": (
        f"{_MODEL}.override_config.max_position_embeddings"
    ),
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
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
    # The first DAPO recipe has use_token_level_loss, true or false.
    f"{_ACTOR}.loss_agg_mode": {True: "token-mean", False: "seq-mean-token-mean"},
    f"{_ACTOR}.policy_loss.loss_mode": {"ppo": "vanilla", "grpo": "vanilla"},
    # Older versions of VERL say which trainer sends the weights.
    f"{_ROLLOUT}.load_format": {
        "dummy_dtensor": "dummy",
        "dummy_megatron": "dummy",
        "dummy_hf": "dummy",
        "hf": "auto",
    },
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
    f"{_ACTOR}.optim.lr_warmup_steps": {None: -1},
    "critic.optim.lr_warmup_steps": {None: -1},
    "sft.optim.lr_warmup_steps": {None: -1},
    "custom_reward_function.name": {None: "compute_score"},
    # Megatron's name of the optimizer.
    f"{_ACTOR}.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "critic.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "sft.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "sft.optim.min_lr_ratio": {None: 0.0},
    "algorithm.filter_groups.metric": {"reward": "score"},
    # The estimator reads the parts of the reward that this manager of VERL keeps.
    "reward_model.reward_manager": {"gdpo": "naive"},
    "speculative.eagle.tune_algorithm": {None: "COST"},
    "data.reward_fn_key": {"reward": "data_source"},
    "trainer.logger": {"jsonl": "file"},
}
"""Our key -> other names of its values, also inside lists."""

KEYS = (*RENAMED, *ONLY_NEUTRAL, *WITHOUT_EFFECT)
"""All keys and patterns that are accepted although the schema does not have them."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A translated assignment: the key to set (None: set nothing), its value, notices, a problem.

    `alias` is the given spelling if it is not ours. `inert` is why the key has no effect; "" if it
    has VERL's default, so that no notice is needed. `warnings` are notices that must be seen. If
    `unless_equal` names an option, `problem` applies only if the final value of that option differs
    from `value`.
    """

    key: str | None
    value: Any
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alias: str | None = None
    inert: str | None = None
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


def _new_value(key: str, value: Any) -> tuple[Any, list[str]]:
    names = RENAMED_VALUES.get(key, {})
    notices: list[str] = []

    def one(item: Any) -> Any:
        for old, new in names.items():
            if same_value(item, old):
                if old is not None:
                    notices.append(f"{key}={old} is an alias of {key}={new}")
                return new
        return item

    if isinstance(value, (list, tuple)):
        return [one(item) for item in value], notices
    return one(value), notices


def ours(key: str) -> str | None:
    """Return our spelling of `key` if it is an alias; None if it is not."""
    renamed = _new_key(key)
    return None if renamed is None else renamed.removesuffix(".0").removesuffix(".1")


def knows(key: str) -> bool:
    """Return whether `key` is accepted although the schema does not have it."""
    tables = (ONLY_NEUTRAL, WITHOUT_EFFECT)
    return _new_key(key) is not None or any(find(key, table) is not None for table in tables)


def refers_to(value: Any, key: str) -> bool:
    """Return whether `value` is an interpolation of `key`, as in VERL's files."""
    pattern = rf"\$\{{(oc\.select:)?{re.escape(key)}(,[^}}]*)?\}}"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def rewrite(key: str, value: Any, *, known: bool, verl: bool = False) -> Rewritten:
    """Translate one assignment to keys and values of the schema.

    `known` is true if the schema has the key, or a free-form mapping that contains it. `verl` is
    true if the settings are written for VERL or FastRL: then values in `TAKEN_VALUES` are taken. A
    key that is not in any table is returned unchanged; the caller reports it.
    """
    alias = None
    if key.rpartition(".")[2] == "_target_":
        return Rewritten(None, None, inert="")  # a class of VERL that Hydra would create
    if not known:
        renamed = _new_key(key)
        if renamed is not None:
            if refers_to(value, renamed):
                return Rewritten(None, None)
            alias, key = key, renamed
        else:
            return _not_ours(key, value)
    value, notices = _new_value(key, value)
    warnings: list[str] = []
    served = next((name for name in SERVED if key == ENGINE_KEY and same_value(value, name)), None)
    missing = served is not None and not is_here(served)
    if verl and key in TAKEN_VALUES and (missing or refused_value(key, value) is not None):
        taken, why = TAKEN_VALUES[key]
        if served is not None:
            why += (
                f"; to use {served}, set {SERVED[served]} to the Python of an environment with it"
            )
        warnings.append(f"{key}={show(value)} {why}")
        value = taken
    return Rewritten(key, value, tuple(notices), tuple(warnings), alias)


def _not_ours(key: str, value: Any) -> Rewritten:
    """Translate an assignment of a key that is neither in the schema nor an alias."""
    neutral = None if key in WITHOUT_EFFECT else find(key, ONLY_NEUTRAL)
    if neutral is not None:
        allowed = any(same_value(value, one) for one in neutral.values)
        if allowed or (neutral.same_as is not None and refers_to(value, neutral.same_as)):
            return Rewritten(None, None, inert="")
        problem = f"{key}={show(value)}: {neutral.remedy}"
        return Rewritten(None, value, problem=problem, unless_equal=neutral.same_as)
    reason = find(key, WITHOUT_EFFECT)
    if reason is None:
        return Rewritten(key, value)
    if PARALLEL_SIZES.search(key) and not (
        value is None or isinstance(value, str) or is_count(value)
    ):
        return Rewritten(None, None, problem=f"{key}={show(value)}: set it to a count, such as 1")
    return Rewritten(None, None, inert="" if is_default(key, value) else reason)


def refused_value(key: str, value: Any) -> str | None:
    """Return the problem and remedy for a value that only VERL supports; None for other values."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        for refused, remedy in REFUSED_VALUES.get(key, {}).items():
            if same_value(item, refused):
                return f"{key}={show(item)}: {remedy}"
    return None


def refers_to_its_target(key: str, value: Any) -> bool:
    """Return whether `key` is another spelling of our key, and `value` an interpolation of it."""
    renamed = _new_key(key)
    return renamed is not None and refers_to(value, renamed)
