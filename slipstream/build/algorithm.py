"""Builds the settings of the RL algorithm: loss, advantages, KL terms, rollout correction."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from slipstream.algorithms import (
    AdvantageConfig,
    AdvantageNeed,
    PFPPOConfig,
    PolicyLossConfig,
    PolicyLossModeConfig,
    RolloutCorrectionConfig,
    adv_needs,
    get_adv_estimator_fn,
    get_kl_controller,
    policy_loss_selection,
)
from slipstream.algorithms.full_kl import KLDirection
from slipstream.config.engines import engine_entry
from slipstream.config.schema import Config
from slipstream.config.validate_algorithm import GROUP_RELATIVE, canonical
from slipstream.errors import ConfigError
from slipstream.loops.rl_batch import KLInReward
from slipstream.loops.rl_config import RLTrainingConfig
from slipstream.rollout.filters import GroupFilter, check_spread
from slipstream.training.losses import FULL_KL, policy_loss_fn
from slipstream.types import SamplingParams

__all__ = [
    "critic_budget",
    "critic_updates",
    "full_kl_in_loss",
    "group_filter",
    "make_kl_in_reward",
    "rl_config",
    "rollout_correction",
    "takes_full_kl",
    "wants_critic",
    "wants_greedy",
    "wants_ref_log_probs",
    "wants_reference",
]

_CORRECTION = "algorithm.rollout_correction"


def rl_config(config: Config, num_steps: int, start_step: int) -> RLTrainingConfig:
    """Build the settings of the RL loop. Raises ConfigError for unregistered names, and for
    settings that the algorithm refuses."""
    a, r, algorithm = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.algorithm,
    )
    mini, batch = a.ppo_mini_batch_size, config.data.train_batch_size
    engine = engine_entry(r.name).capabilities
    _check_needs(config)
    correction = rollout_correction(config)
    mode = a.policy_loss.loss_mode
    if correction is not None and correction.bypass_mode:
        mode = "bypass_mode"
    loss = _loss_config(config, correction)
    try:
        select = policy_loss_selection(mode)
    except ValueError as error:
        key = "actor_rollout_ref.actor.policy_loss.loss_mode"
        raise ConfigError(f"{key}: {error}") from error
    try:
        advantages = _advantage_config(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    critic_epochs, critic_mini = critic_updates(config)
    shuffles = a.shuffle if config.critic.shuffle is None else config.critic.shuffle
    order = f"mini-batches/{config.trainer.seed}"
    return RLTrainingConfig(
        num_steps=num_steps,
        start_step=start_step,
        max_failed_share=r.max_failed_share,
        loss=policy_loss_fn(
            loss_mode=mode,
            loss_agg_mode=a.loss_agg_mode,
            config=loss,
            entropy_coeff=a.entropy_coeff,
            use_kl_loss=a.use_kl_loss,
            kl_loss_coef=a.kl_loss_coef,
            kl_loss_type=a.kl_loss_type,
        ),
        select=None if select is None else partial(select, config=loss),
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        adv_estimator=algorithm.adv_estimator,
        advantages=advantages,
        correction=correction,
        pf_ppo=advantages.pf_ppo if advantages.use_pf_ppo else None,
        replay=SamplingParams(max_tokens=1, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)
        if algorithm.rollout_correction.support_replay
        else None,
        compared=canonical(algorithm.adv_estimator) in GROUP_RELATIVE,
        # For greedy decoding the engine records log-probs at temperature 1.
        temperature=r.temperature if r.do_sample else 1.0,
        mini_batch_size=None if mini in (None, batch) else mini,
        ppo_epochs=a.ppo_epochs,
        critic_mini_batch_size=None if critic_mini == batch else critic_mini,
        critic_epochs=critic_epochs,
        critic_warmup=config.trainer.critic_warmup,
        schedule_by_rl_step=a.optim.lr_schedule_unit == "rl_step",
        critic_schedule_by_rl_step=config.critic.optim.lr_schedule_unit == "rl_step",
        shuffle=order if a.shuffle else None,
        critic_shuffle=order if shuffles else None,
        sync_every=config.trainer.sync_every,
        # A draft head learns from rows with keys, which also say what prompts are held out.
        noise_seed=config.trainer.seed if engine.drafts else None,
        seed=config.trainer.seed,
    )


def _check_needs(config: Config) -> None:
    """Check the advantage estimator and the settings that depend on it."""
    needs(config)
    if config.trainer.critic_warmup and not wants_critic(config):
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic; set "
            "critic.enable=true or trainer.critic_warmup=0"
        )
    path = config.actor_rollout_ref.ref.path
    if path is not None and not wants_reference(config):
        raise ConfigError(
            f"actor_rollout_ref.ref.path={path} has no effect without a KL term; set "
            "actor_rollout_ref.actor.use_kl_loss=true or actor_rollout_ref.ref.path=null"
        )


def needs(config: Config) -> frozenset[AdvantageNeed]:
    """The inputs that the advantage estimator needs besides rewards. Raises ConfigError if it is
    unknown."""
    name = config.algorithm.adv_estimator
    try:
        get_adv_estimator_fn(name)
        return adv_needs(name)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from error


def wants_critic(config: Config) -> bool:
    """True if there is a critic: `critic.enable`, or if null, whether the estimator needs
    values."""
    enable = config.critic.enable
    return AdvantageNeed.VALUES in needs(config) if enable is None else enable


def critic_updates(config: Config) -> tuple[int, int]:
    """The critic's passes over a rollout batch, and its prompts per optimizer step."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    mini = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size or config.data.train_batch_size
    return critic.ppo_epochs or actor.ppo_epochs, mini


def critic_budget(config: Config) -> int | None:
    """Tokens per forward pass of the critic; None if it packs by rows."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    dynamic = critic.use_dynamic_bsz
    if dynamic is None:
        dynamic = critic.ppo_micro_batch_size_per_gpu is None and actor.use_dynamic_bsz
    return (
        (critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu) if dynamic else None
    )


def wants_greedy(config: Config) -> bool:
    """True if each group also needs a greedy response."""
    return AdvantageNeed.REWARD_BASELINES in needs(config)


def full_kl_in_loss(config: Config) -> KLDirection | None:
    """The KL over the whole vocabulary in the loss, if any."""
    actor = config.actor_rollout_ref.actor
    return FULL_KL.get(actor.kl_loss_type) if actor.use_kl_loss else None


def takes_full_kl(config: Config) -> bool:
    """True if the loss or the reward uses the KL over the whole vocabulary."""
    return full_kl_in_loss(config) is not None or _full_kl_in_reward(config)


def _full_kl_in_reward(config: Config) -> bool:
    return config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty in FULL_KL


def wants_ref_log_probs(config: Config) -> bool:
    """True if the reference's log-probs of the sampled tokens are needed."""
    actor = config.actor_rollout_ref.actor
    return (
        (config.algorithm.use_kl_in_reward and not _full_kl_in_reward(config))
        or (actor.use_kl_loss and full_kl_in_loss(config) is None)
        or AdvantageNeed.REF_LOG_PROBS in needs(config)
    )


def wants_reference(config: Config) -> bool:
    """True if there is a reference policy or a teacher."""
    return wants_ref_log_probs(config) or takes_full_kl(config)


def rollout_correction(config: Config) -> RolloutCorrectionConfig | None:
    """The settings of `algorithm.rollout_correction`; None if it does nothing. Raises
    ConfigError."""
    given = config.algorithm.rollout_correction
    try:
        if given.preset is not None:
            return RolloutCorrectionConfig.preset(given.preset)
        correction = RolloutCorrectionConfig(
            **{f.name: getattr(given, f.name) for f in fields(given) if f.name not in _JOINED},
            rollout_rs=_joined(given.rollout_rs),
            rollout_rs_threshold=_joined(given.rollout_rs_threshold),
        )
    except ValueError as error:
        named = str(error).startswith(_CORRECTION)
        raise ConfigError(str(error) if named else f"{_CORRECTION}.preset: {error}") from error
    return correction if correction.enabled or correction.bypass_mode else None


_JOINED = frozenset(("preset", "support_replay", "rollout_rs", "rollout_rs_threshold"))


def _joined(entries: tuple[float | str, ...] | str | float | None) -> str | None:
    if entries is None:
        return None
    return ",".join(map(str, entries)) if isinstance(entries, tuple) else str(entries)


def group_filter(config: Config) -> GroupFilter | None:
    """The group filter of `algorithm.filter_groups`, if any."""
    wanted = config.algorithm.filter_groups
    if not wanted.enable:
        return None
    return partial(check_spread, metric=wanted.metric or "score")


def make_kl_in_reward(config: Config) -> KLInReward | None:
    """The KL penalty in the reward (`algorithm.use_kl_in_reward`), if any."""
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        return None
    ctrl = algorithm.kl_ctrl
    controller = get_kl_controller(
        ctrl.type, kl_coef=ctrl.kl_coef, target_kl=ctrl.target_kl, horizon=ctrl.horizon
    )
    return KLInReward(controller, algorithm.kl_penalty)


def _advantage_config(config: Config) -> AdvantageConfig:
    algorithm = config.algorithm
    return AdvantageConfig(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gdpo_reward_keys=algorithm.gdpo_reward_keys or (),
        gdpo_reward_weights=algorithm.gdpo_reward_weights,
        use_pf_ppo=algorithm.use_pf_ppo,
        pf_ppo=PFPPOConfig(
            reweight_method=algorithm.pf_ppo.reweight_method,
            weight_pow=algorithm.pf_ppo.weight_pow,
        ),
    )


def _loss_config(config: Config, correction: RolloutCorrectionConfig | None) -> PolicyLossConfig:
    a = config.actor_rollout_ref.actor
    modes, horizon = a.policy_loss, a.loss_scale_factor
    if a.loss_agg_mode == "seq-mean-token-sum-norm" and horizon is None:
        horizon = float(config.data.max_response_length)
    try:
        return PolicyLossConfig(
            clip_ratio=a.clip_ratio,
            clip_ratio_low=a.clip_ratio_low,
            clip_ratio_high=a.clip_ratio_high,
            clip_ratio_c=a.clip_ratio_c,
            tau_pos=a.tau_pos,
            tau_neg=a.tau_neg,
            policy_loss=PolicyLossModeConfig(
                **{f.name: getattr(modes, f.name) for f in fields(modes)},
                loss_type="ppo_clip" if correction is None else correction.loss_type,
            ),
            loss_scale_factor=horizon,
        )
    except ValueError as error:
        raise ConfigError(f"actor_rollout_ref.actor: {error}") from error
