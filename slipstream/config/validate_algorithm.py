"""Rules between options of `algorithm`, the policy loss and the reference policy.

`validate` calls `algorithm_rules`. Other modules should import `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from slipstream.config.engines import engine_lacks, engines_with
from slipstream.config.rules import WithoutEffect
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ActorSection, PolicyLossSection
from slipstream.config.schema_algorithm import (
    AlgorithmSection,
    FilterGroupsSection,
    PFPPOSection,
    RolloutCorrectionSection,
)
from slipstream.config.tree import show

GROUP_RELATIVE = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gdpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)
"""Built-in advantage estimators that compare the responses to one prompt."""

NEEDS_CRITIC = frozenset({"gae"})
"""Built-in advantage estimators that use the values of a critic."""

DISTILLATION = "on_policy_distillation"
"""The advantage estimator that uses the reference policy as a teacher."""

USED_BY_ESTIMATORS = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    "use_kl_in_reward": tuple(
        sorted((GROUP_RELATIVE | NEEDS_CRITIC | {"remax", "reinforce_plus_plus"}) - {"gdpo"})
    ),
}
"""Settings of `algorithm` -> the built-in advantage estimators that use them."""

ESTIMATORS = GROUP_RELATIVE | NEEDS_CRITIC | {"remax", "reinforce_plus_plus", DISTILLATION}
"""Built-in advantage estimators. The rules do not apply to estimators that users register."""

TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Built-in advantage estimators with one baseline per token."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref.path"

USED_BY_LOSS = {
    "clip_cov_ratio": "clip_cov",
    "clip_cov_lb": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
    "gspo_uses_loss_agg_mode": "gspo",
}
"""Settings of `policy_loss` that only one loss mode uses -> that loss mode."""


OWN_AGGREGATION = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "the mean over sequences",
}
"""Policy losses that do not aggregate with `loss_agg_mode` -> how they aggregate."""


def algorithm_rules(config: Config) -> Iterator[str]:
    """Yield a message `what is wrong; remedy` for each broken rule."""
    yield from _estimator(config)
    yield from _advantage_settings(config.algorithm)
    yield from _sampling_of_groups(config.algorithm, config.actor_rollout_ref.rollout.n)
    yield from _loss(config.actor_rollout_ref.actor)
    yield from _correction(config)
    yield from _replay(config)
    yield from _reference(config)
    yield from _kl_controller(config)


def canonical(name: str) -> str:
    """Return the registered spelling of an estimator's name: `reinforce_plus_plus`, not `++`."""
    registered = name.replace("++", "_plus_plus").replace("-", "_")
    return registered if registered in ESTIMATORS else name


def _estimator(config: Config) -> Iterator[str]:
    name, rollout, critic = (
        canonical(config.algorithm.adv_estimator),
        config.actor_rollout_ref.rollout,
        config.critic,
    )
    if name in NEEDS_CRITIC and critic.enable is False:
        yield (
            f"algorithm.adv_estimator={name} needs a critic, but critic.enable=false; set "
            "critic.enable=null or algorithm.adv_estimator=grpo"
        )
    without_critic = name in ESTIMATORS - NEEDS_CRITIC
    if config.trainer.critic_warmup and without_critic and not critic.enable:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic; set "
            "algorithm.adv_estimator=gae or trainer.critic_warmup=0"
        )
    if name in GROUP_RELATIVE and rollout.n < 2:
        yield (
            f"algorithm.adv_estimator={name} compares the responses to a prompt, but "
            f"{_ROLLOUT}.n={rollout.n} generates only one; set {_ROLLOUT}.n=8"
        )
    if name in GROUP_RELATIVE | {"remax"} and not rollout.do_sample:
        yield (
            f"algorithm.adv_estimator={name} compares the responses to a prompt, but "
            f"{_ROLLOUT}.do_sample=false makes all of them equal; set {_ROLLOUT}.do_sample=true"
        )


def _advantage_settings(algorithm: AlgorithmSection) -> Iterator[str]:
    name = canonical(algorithm.adv_estimator)
    for key, users in USED_BY_ESTIMATORS.items():
        value, default = getattr(algorithm, key), getattr(AlgorithmSection(), key)
        if value != default and name in ESTIMATORS and name not in users:
            yield WithoutEffect(
                f"algorithm.{key}={show(value)} has no effect with algorithm.adv_estimator={name}; "
                f"set algorithm.{key}={show(default)} or algorithm.adv_estimator={users[0]}"
            )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo":
        if not keys:
            yield (
                "algorithm.adv_estimator=gdpo normalizes parts of the reward, but "
                "algorithm.gdpo_reward_keys is not set; set it to keys that the reward function "
                "returns in addition to the score, for example "
                "algorithm.gdpo_reward_keys=[acc,format]"
            )
        elif weights is not None and len(weights) != len(keys):
            yield (
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers, but "
                f"algorithm.gdpo_reward_keys has {len(keys)} keys; give one number per key, or set "
                "algorithm.gdpo_reward_weights=null"
            )
    else:
        for key, value in (("gdpo_reward_keys", keys), ("gdpo_reward_weights", weights)):
            if value is not None:
                yield WithoutEffect(
                    f"algorithm.{key}={show(value)} has no effect with algorithm.adv_estimator="
                    f"{algorithm.adv_estimator}; set algorithm.adv_estimator=gdpo or "
                    f"algorithm.{key}=null"
                )


def _sampling_of_groups(algorithm: AlgorithmSection, n: int) -> Iterator[str]:
    if algorithm.filter_groups.enable and n < 2:
        yield WithoutEffect(
            f"algorithm.filter_groups.enable=true has no effect with {_ROLLOUT}.n={n}, because it "
            f"keeps all groups of one response; set {_ROLLOUT}.n=8 or "
            "algorithm.filter_groups.enable=false"
        )
    for section, settings, defaults, switch in (
        ("pf_ppo", algorithm.pf_ppo, PFPPOSection(), "use_pf_ppo"),
        (
            "filter_groups",
            algorithm.filter_groups,
            FilterGroupsSection(
                enable=algorithm.filter_groups.enable,
                # It has the same meaning as null, and is VERL's default.
                metric="score" if algorithm.filter_groups.metric == "score" else None,
            ),
            "filter_groups.enable",
        ),
    ):
        on = algorithm.use_pf_ppo if section == "pf_ppo" else algorithm.filter_groups.enable
        if settings != defaults and not on:
            name = next(
                f.name
                for f in fields(settings)
                if getattr(settings, f.name) != getattr(defaults, f.name)
            )
            yield WithoutEffect(
                f"algorithm.{section}.{name}={show(getattr(settings, name))} has no effect with "
                f"algorithm.{switch}=false; set algorithm.{switch}=true or "
                f"algorithm.{section}.{name}={show(getattr(defaults, name))}"
            )


def _loss(actor: ActorSection) -> Iterator[str]:
    defaults, mode = ActorSection(), actor.policy_loss.loss_mode
    if mode == "dro" and actor.policy_loss.dro_beta is None:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode=dro needs a weight for its penalty on the squared "
            f"log-ratio, but {_ACTOR}.policy_loss.dro_beta is not set; set "
            f"{_ACTOR}.policy_loss.dro_beta=0.1"
        )
    for name, user in USED_BY_LOSS.items():
        value, default = getattr(actor.policy_loss, name), getattr(PolicyLossSection(), name)
        if value != default and mode != user:
            yield _unused_by_loss(f"{_ACTOR}.policy_loss.{name}", value, default, mode, user)
    for name in ("tau_pos", "tau_neg"):
        value, default = getattr(actor, name), getattr(defaults, name)
        if value != default and mode != "sapo":
            yield _unused_by_loss(f"{_ACTOR}.{name}", value, default, mode, "sapo")


def _unused_by_loss(key: str, value: object, default: object, mode: str, user: str) -> str:
    """Return the message for a setting that the loss `mode` ignores and the loss `user` uses."""
    return WithoutEffect(
        f"{key}={show(value)} has no effect with {_ACTOR}.policy_loss.loss_mode={mode}; set "
        f"{_ACTOR}.policy_loss.loss_mode={user} or {key}={show(default)}"
    )


def _correction(config: Config) -> Iterator[str]:
    key, correction = "algorithm.rollout_correction", config.algorithm.rollout_correction
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.preset is not None:
        defaults = RolloutCorrectionSection(
            preset=correction.preset, support_replay=correction.support_replay
        )
        for f in fields(correction):
            value, default = getattr(correction, f.name), getattr(defaults, f.name)
            if value != default:
                yield (
                    f"{key}.{f.name}={show(value)} conflicts with {key}.preset="
                    f"{correction.preset}, which sets all options of {key}; set "
                    f"{key}.{f.name}={show(default)}, or set {key}.preset=null and the options "
                    "one by one"
                )
        bypass = correction.preset.startswith("bypass_")
    else:
        bypass = correction.bypass_mode
    if bypass and mode not in ("vanilla", "bypass_mode", "rollout_correction"):
        yield (
            f"{key}.bypass_mode=true uses its own loss, not {_ACTOR}.policy_loss.loss_mode="
            f"{mode}; set {_ACTOR}.policy_loss.loss_mode=vanilla or {key}.bypass_mode=false"
        )
    if mode in ("bypass_mode", "rollout_correction") and not bypass:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={mode} needs {key}.bypass_mode=true; set it, "
            f"or {_ACTOR}.policy_loss.loss_mode=vanilla"
        )


def _replay(config: Config) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, "algorithm.rollout_correction.support_replay"
    if not config.algorithm.rollout_correction.support_replay:
        return
    truncates = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    if not truncates or not rollout.do_sample:
        yield WithoutEffect(
            f"{key}=true has no effect, because the rollout samples from the whole vocabulary or "
            f"greedily; set {_ROLLOUT}.top_p=0.95 with {_ROLLOUT}.do_sample=true, or {key}=false"
        )
    actor = config.actor_rollout_ref.actor
    if rollout.dtype not in ("auto", actor.dtype):
        yield (
            f"{key}=true needs the same dtype in trainer and rollout, but {_ACTOR}.dtype="
            f"{actor.dtype} and {_ROLLOUT}.dtype={rollout.dtype}; set {_ROLLOUT}.dtype=auto or "
            f"{key}=false"
        )
    if canonical(config.algorithm.adv_estimator) in TOKEN_BASELINES:
        yield (
            f"{key}=true does not work with algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator}, which weights tokens by probabilities over the "
            f"whole vocabulary; set {key}=false or algorithm.adv_estimator=grpo"
        )
    if engine_lacks(config, lambda engine: engine.exact):
        yield (
            f"{key}=true needs an engine with exact mode, not "
            f"{_ROLLOUT}.name={rollout.name}; set "
            f"{engines_with(lambda engine: engine.exact)} or {key}=false"
        )
    if config.trainer.sync_every != 1:
        yield (
            f"{key}=true needs the same weights in trainer and rollout, but "
            f"trainer.sync_every={config.trainer.sync_every}; set trainer.sync_every=1 or "
            f"{key}=false"
        )
    if rollout.partial_rollout:
        yield (
            f"{key}=true does not work with {_ROLLOUT}.partial_rollout=true, because the trainer "
            "cannot replay responses that older weights started; set "
            f"{_ROLLOUT}.partial_rollout=false or {key}=false"
        )


def _reference(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    path = config.actor_rollout_ref.ref.path
    name = canonical(algorithm.adv_estimator)
    distills = name == DISTILLATION
    without_teacher = name in ESTIMATORS - {DISTILLATION}
    uses_kl = actor.use_kl_loss or algorithm.use_kl_in_reward
    if path is not None and without_teacher and not uses_kl:
        yield WithoutEffect(
            f"{_REF}={path} has no effect without a KL term; set "
            f"{_ACTOR}.use_kl_loss=true or {_REF}=null"
        )
    if path is None and distills:
        yield (
            f"algorithm.adv_estimator={DISTILLATION} needs a teacher, but {_REF} is not set; set "
            f"{_REF}=FOLDER to its checkpoint"
        )


def _kl_controller(config: Config) -> Iterator[str]:
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if control.type == "adaptive" and 5 * control.horizon <= samples:
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon} must be above a fifth of the {samples} "
            "samples of a step, else one step could make the KL coefficient negative; set "
            f"algorithm.kl_ctrl.horizon={10 * samples}"
        )
