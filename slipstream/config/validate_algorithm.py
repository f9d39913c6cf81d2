"""Rules of `algorithm`, the policy loss and the reference policy.

Part of `validate`, which is what other modules import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from slipstream.config.engines import engine_lacks, engines_with
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
"""Advantage estimators that compare the responses to one prompt."""

NEEDS_CRITIC = frozenset({"gae"})
"""Advantage estimators that take values."""

TEACHES = "on_policy_distillation"
"""The advantage estimator whose reference is a teacher."""

READ_BY = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    "use_kl_in_reward": tuple(
        sorted((GROUP_RELATIVE | NEEDS_CRITIC | {"remax", "reinforce_plus_plus"}) - {"gdpo"})
    ),
}
"""Settings of `algorithm` -> the estimators that ship and read them."""

ESTIMATORS = GROUP_RELATIVE | NEEDS_CRITIC | {"remax", "reinforce_plus_plus", TEACHES}
"""Those that ship. Of others nobody knows here what they need."""

TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref.path"

OF_ONE_LOSS = {
    "clip_cov_ratio": "clip_cov",
    "clip_cov_lb": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
}
"""Settings of `policy_loss` that a single loss mode reads."""


def algorithm_rules(config: Config) -> Iterator[str]:
    """Every broken rule, as `what is wrong; remedy`."""
    yield from _estimator(config)
    yield from _advantage_settings(config.algorithm)
    yield from _sampling_of_groups(config.algorithm, config.actor_rollout_ref.rollout.n)
    yield from _loss(config.actor_rollout_ref.actor)
    yield from _correction(config)
    yield from _replay(config)
    yield from _reference(config)
    yield from _kl_controller(config)


def canonical(name: str) -> str:
    """An estimator's name in the registry's spelling."""
    other = name.replace("++", "_plus_plus").replace("-", "_")
    return other if other in ESTIMATORS else name


def _estimator(config: Config) -> Iterator[str]:
    name, rollout, critic = (
        canonical(config.algorithm.adv_estimator),
        config.actor_rollout_ref.rollout,
        config.critic,
    )
    if name in NEEDS_CRITIC and critic.enable is False:
        yield (
            f"algorithm.adv_estimator={name} takes a critic's values and critic.enable=false; set "
            "critic.enable=null or algorithm.adv_estimator=grpo"
        )
    known = name in ESTIMATORS - NEEDS_CRITIC
    if config.trainer.critic_warmup and known and not critic.enable:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic; set "
            "algorithm.adv_estimator=gae or trainer.critic_warmup=0"
        )
    if name in GROUP_RELATIVE and rollout.n < 2:
        yield (
            f"algorithm.adv_estimator={name} compares the responses to a prompt and "
            f"{_ROLLOUT}.n={rollout.n} leaves none to compare with; set {_ROLLOUT}.n=8"
        )
    if name in GROUP_RELATIVE | {"remax"} and not rollout.do_sample:
        yield (
            f"{_ROLLOUT}.do_sample=false makes all responses to a prompt the same and "
            f"algorithm.adv_estimator={name} compares them; set {_ROLLOUT}.do_sample=true"
        )


def _advantage_settings(algorithm: AlgorithmSection) -> Iterator[str]:
    name = canonical(algorithm.adv_estimator)
    for key, users in READ_BY.items():
        value, default = getattr(algorithm, key), getattr(AlgorithmSection(), key)
        if value != default and name in ESTIMATORS and name not in users:
            yield (
                f"algorithm.{key}={show(value)} has no effect with algorithm.adv_estimator={name}; "
                f"set algorithm.{key}={show(default)} or algorithm.adv_estimator={users[0]}"
            )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo":
        if not keys:
            yield (
                "algorithm.adv_estimator=gdpo normalises parts of the reward, and none is named; "
                "name what the reward function gives beside the score, as in "
                "algorithm.gdpo_reward_keys=[acc,format]"
            )
        elif weights is not None and len(weights) != len(keys):
            yield (
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} parts "
                "in algorithm.gdpo_reward_keys; give one each, or set "
                "algorithm.gdpo_reward_weights=null"
            )
    else:
        for key, value in (("gdpo_reward_keys", keys), ("gdpo_reward_weights", weights)):
            if value is not None:
                yield (
                    f"algorithm.{key}={show(value)} has no effect with algorithm.adv_estimator="
                    f"{algorithm.adv_estimator}; set algorithm.adv_estimator=gdpo or "
                    f"algorithm.{key}=null"
                )


def _sampling_of_groups(algorithm: AlgorithmSection, n: int) -> Iterator[str]:
    if algorithm.filter_groups.enable and n < 2:
        yield (
            f"algorithm.filter_groups.enable=true compares the responses to a prompt and keeps "
            f"single ones, so that with {_ROLLOUT}.n={n} it has no effect; set {_ROLLOUT}.n=8 or "
            "algorithm.filter_groups.enable=false"
        )
    for section, given, usual, switch in (
        ("pf_ppo", algorithm.pf_ppo, PFPPOSection(), "use_pf_ppo"),
        (
            "filter_groups",
            algorithm.filter_groups,
            FilterGroupsSection(enable=algorithm.filter_groups.enable),
            "filter_groups.enable",
        ),
    ):
        on = algorithm.use_pf_ppo if section == "pf_ppo" else algorithm.filter_groups.enable
        if given != usual and not on:
            name = next(
                f.name for f in fields(given) if getattr(given, f.name) != getattr(usual, f.name)
            )
            yield (
                f"algorithm.{section}.{name}={show(getattr(given, name))} has no effect with "
                f"algorithm.{switch}=false; set algorithm.{switch}=true or "
                f"algorithm.{section}.{name}={show(getattr(usual, name))}"
            )


def _loss(actor: ActorSection) -> Iterator[str]:
    usual, mode = ActorSection(), actor.policy_loss.loss_mode
    if mode == "dro" and actor.policy_loss.dro_beta is None:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode=dro needs the weight of its penalty on the squared "
            f"log-ratio; set {_ACTOR}.policy_loss.dro_beta=0.1"
        )
    for name, of in OF_ONE_LOSS.items():
        value, default = getattr(actor.policy_loss, name), getattr(PolicyLossSection(), name)
        if value != default and mode != of:
            yield _of_other_loss(f"{_ACTOR}.policy_loss.{name}", value, default, mode, of)
    for name in ("tau_pos", "tau_neg"):
        value, default = getattr(actor, name), getattr(usual, name)
        if value != default and mode != "sapo":
            yield _of_other_loss(f"{_ACTOR}.{name}", value, default, mode, "sapo")


def _of_other_loss(key: str, value: object, default: object, mode: str, of: str) -> str:
    return (
        f"{key}={show(value)} has no effect with {_ACTOR}.policy_loss.loss_mode={mode}; set "
        f"{_ACTOR}.policy_loss.loss_mode={of} or {key}={show(default)}"
    )


def _correction(config: Config) -> Iterator[str]:
    key, correction = "algorithm.rollout_correction", config.algorithm.rollout_correction
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.preset is not None:
        usual = RolloutCorrectionSection(
            preset=correction.preset, support_replay=correction.support_replay
        )
        for f in fields(correction):
            value = getattr(correction, f.name)
            if value != getattr(usual, f.name):
                yield (
                    f"{key}.{f.name}={show(value)}: {key}.preset={correction.preset} sets all of "
                    f"them; set {key}.preset=null and each by itself"
                )
        bypass = correction.preset.startswith("bypass_")
    else:
        bypass = correction.bypass_mode
    if bypass and mode not in ("vanilla", "bypass_mode", "rollout_correction"):
        yield (
            f"{key}.bypass_mode=true has a loss of its own and {_ACTOR}.policy_loss.loss_mode="
            f"{mode}; set {_ACTOR}.policy_loss.loss_mode=vanilla or {key}.bypass_mode=false"
        )
    if mode in ("bypass_mode", "rollout_correction") and not bypass:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={mode} is the loss of {key}.bypass_mode=true; set it, "
            f"or {_ACTOR}.policy_loss.loss_mode=vanilla"
        )


def _replay(config: Config) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, "algorithm.rollout_correction.support_replay"
    if not config.algorithm.rollout_correction.support_replay:
        return
    cuts = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    if not cuts or not rollout.do_sample:
        yield (
            f"{key}=true has no effect where the rollout samples from the whole vocabulary, or "
            f"greedily; set {_ROLLOUT}.top_p=0.95 or {key}=false"
        )
    actor = config.actor_rollout_ref.actor
    if rollout.dtype not in ("auto", actor.dtype):
        yield (
            f"{key}=true computes again what the sampler kept, in {_ACTOR}.dtype={actor.dtype}, "
            f"and it samples in {_ROLLOUT}.dtype={rollout.dtype}; set {_ROLLOUT}.dtype=auto or "
            f"{key}=false"
        )
    if canonical(config.algorithm.adv_estimator) in TOKEN_BASELINES:
        yield (
            f"{key}=true: algorithm.adv_estimator={config.algorithm.adv_estimator} weighs tokens "
            f"by probabilities over the whole vocabulary; set {key}=false or "
            "algorithm.adv_estimator=grpo"
        )
    if engine_lacks(config, lambda engine: engine.exact):
        yield (
            f"{key}=true computes again what the sampler kept, which takes an engine with the "
            f"trainer's bits; set {engines_with(lambda engine: engine.exact)} or {key}=false"
        )
    if config.trainer.sync_every != 1:
        yield (
            f"{key}=true: with trainer.sync_every={config.trainer.sync_every} the weights "
            f"of the trainer are not those that sampled; set trainer.sync_every=1 or {key}=false"
        )
    if rollout.partial_rollout:
        yield (
            f"{key}=true: responses that were begun with older weights cannot be replayed; set "
            f"{_ROLLOUT}.partial_rollout=false or {key}=false"
        )


def _reference(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    path = config.actor_rollout_ref.ref.path
    name = canonical(algorithm.adv_estimator)
    teaches = name == TEACHES
    known = name in ESTIMATORS - {TEACHES}
    if path is not None and known and not (actor.use_kl_loss or algorithm.use_kl_in_reward):
        yield (
            f"{_REF}={path} has no effect without a KL term; set "
            f"{_ACTOR}.use_kl_loss=true or {_REF}=null"
        )
    if path is None and teaches:
        yield (
            f"algorithm.adv_estimator={TEACHES} learns from a teacher and none is named; set "
            f"{_REF}=FOLDER of its checkpoint"
        )


def _kl_controller(config: Config) -> Iterator[str]:
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if control.type == "adaptive" and 5 * control.horizon <= samples:
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon} is not more than a fifth of a step's "
            f"{samples} samples: one step could turn the coefficient negative; set "
            f"algorithm.kl_ctrl.horizon={10 * samples}"
        )
