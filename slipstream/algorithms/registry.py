"""Names of advantage estimators and policy losses, and how users add their own.

Two registries under VERL's names. They know nothing about what the functions compute. The loop's
wiring looks functions up by the configured name; user code registers with the decorators, in the
module that `actor_rollout_ref.model.external_lib` names, or in any that is imported before.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar, cast

from torch import Tensor

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""`(*, token_level_rewards, response_mask, index, config) -> (advantages, returns)`.

`token_level_rewards` and `response_mask` are (B, T), `index` holds B group keys (the prompt's
uid), `config` is an `AdvantageConfig`; `AdvantageNeed` describes what an estimator may ask for
besides. Both results are (B, T), 0 where masked; float64 if the rewards are, else float32. Called
with keywords only, on the whole batch; further keywords may be added, so user functions should take
`**kwargs`.
"""

LossMetrics = dict[str, Tensor | float]
"""Scalars of one micro-batch (detached). They add up: the sum over the micro-batches of a
mini-batch is the mini-batch's value."""

PolicyLossFn = Callable[..., tuple[Tensor, LossMetrics]]
"""`(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
-> (loss, metrics)`.

All tensors are (B, T); `config` is a `PolicyLossConfig`, `rollout_is_weights` may be None. The
loss is a scalar, linear in rows given `config.normalizers`, so that micro-batches add up.
"""

PolicyLossSelection = Callable[..., Tensor]
"""`(old_log_prob, log_prob, advantages, response_mask, config, *, lots=None) -> selected`.

Chooses the tokens that a loss treats in its own way, over a whole mini-batch and all ranks, once
before its micro-batches: all are (B, T), the result bool; `lots` are int64, as `token_lots` draws
them. Only values at target tokens count, not where they stand: ranks may gather their target tokens
into one (1, N) row.
"""

_Fn = TypeVar("_Fn", bound=Callable[..., object])


class AdvantageEstimator(StrEnum):
    """The estimators that ship."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    REMAX = "remax"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    ON_POLICY_DISTILLATION = "on_policy_distillation"


class AdvantageNeed(StrEnum):
    """What an estimator needs beyond rewards, mask and group keys; the keyword that brings it."""

    VALUES = "values"
    """(B, T): the critic's values."""
    REWARD_BASELINES = "reward_baselines"
    """(B,): scores of the prompts' greedy responses."""
    OLD_LOG_PROBS = "old_log_probs"
    """(B, T): log-probs under the policy before the update."""
    REF_LOG_PROBS = "ref_log_probs"
    """(B, T): log-probs under the reference model."""
    SUM_PI_SQUARED = "sum_pi_squared"
    """(B, T): sum over the vocabulary of squared probabilities, under the policy before the
    update."""
    ROLLOUT_IS_WEIGHTS = "rollout_is_weights"
    """(B, T): importance weights of the rollout correction; the only one that is brought just where
    it exists."""
    REWARD_PARTS = "reward_parts"
    """Name to (B,): named components of the rewards."""


class RegistryError(ValueError):
    """A name is unknown, or already taken by another function."""


_ADVANTAGES: dict[str, AdvantageFn] = {}
_NEEDS: dict[str, frozenset[AdvantageNeed]] = {}
_POLICY_LOSSES: dict[str, PolicyLossFn] = {}
_SELECTIONS: dict[PolicyLossFn, PolicyLossSelection] = {}


def register_adv_est(
    name: str | AdvantageEstimator, *, needs: Iterable[AdvantageNeed] = ()
) -> Callable[[_Fn], _Fn]:
    """Decorator: make an `AdvantageFn` available as `algorithm.adv_estimator=<name>`.

    The caller passes each of `needs` under its own name.

    Raises:
        RegistryError: another function has the name.
        ValueError: a need that is none.
    """
    key, needed = registered_name(name), frozenset(AdvantageNeed(need) for need in needs)
    register = _register(_ADVANTAGES, "advantage estimator", key)

    def decorate(fn: _Fn) -> _Fn:
        register(fn)
        _NEEDS[key] = needed
        return fn

    return decorate


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator registered under `name`, or under its spelling with `_plus_plus` for `++` and
    `_` for `-`.

    Raises:
        RegistryError: no such name; the message lists the known ones.
    """
    return _lookup(_ADVANTAGES, "advantage estimator", "register_adv_est", registered_name(name))


def adv_needs(name: str | AdvantageEstimator) -> frozenset[AdvantageNeed]:
    """What the estimator `name` is to be given beyond rewards, mask, group keys and config.

    Raises:
        RegistryError: as `get_adv_estimator_fn`.
    """
    get_adv_estimator_fn(name)
    return _NEEDS.get(registered_name(name), frozenset())


def register_policy_loss(
    name: str, *, select: PolicyLossSelection | None = None
) -> Callable[[_Fn], _Fn]:
    """Decorator: make a `PolicyLossFn` available as
    `actor_rollout_ref.actor.policy_loss.loss_mode=<name>`.

    `select` is for losses that treat some tokens of the mini-batch differently: the trainer calls
    it once over the whole mini-batch, and the loss finds its rows' part in `config.selected`.

    Raises:
        RegistryError: another function has the name. VERL overwrites without a word here; two
            modules that pick one name would then train with whichever was imported last.
    """
    register = _register(_POLICY_LOSSES, "policy loss", name)

    def decorate(fn: _Fn) -> _Fn:
        register(fn)
        if select is not None:
            _SELECTIONS[cast(PolicyLossFn, fn)] = select
        return fn

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered under `name`.

    Raises:
        RegistryError: no such name; the message lists the known ones.
    """
    return _lookup(_POLICY_LOSSES, "policy loss", "register_policy_loss", name)


def policy_loss_selection(name: str) -> PolicyLossSelection | None:
    """What selects tokens for the policy loss `name`; None where the loss needs no selection.

    Raises:
        RegistryError: no such loss; the message lists the known ones.
    """
    return _SELECTIONS.get(get_policy_loss_fn(name))


def adv_estimator_names() -> tuple[str, ...]:
    """Every registered estimator, sorted."""
    return tuple(sorted(_ADVANTAGES))


def policy_loss_names() -> tuple[str, ...]:
    """Every registered policy loss, sorted."""
    return tuple(sorted(_POLICY_LOSSES))


def registered_name(name: str | AdvantageEstimator) -> str:
    """`name` itself, unless it is another spelling of an estimator that exists."""
    other = str(name).replace("++", "_plus_plus").replace("-", "_")
    return other if str(name) not in _ADVANTAGES and other in _ADVANTAGES else str(name)


def _register(table: dict[str, Any], kind: str, name: str) -> Callable[[_Fn], _Fn]:
    key = str(name)

    def decorate(fn: _Fn) -> _Fn:
        known = table.setdefault(key, fn)
        if known is not fn:
            raise RegistryError(
                f"{kind} {key!r} is already registered by "
                f"{getattr(known, '__module__', '?')}.{getattr(known, '__qualname__', known)}; "
                f"register yours under another name"
            )
        return fn

    return decorate


def _lookup(table: dict[str, _Fn], kind: str, decorator: str, name: str) -> _Fn:
    fn = table.get(str(name))
    if fn is None:
        near = difflib.get_close_matches(str(name), table, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise RegistryError(
            f"unknown {kind} {str(name)!r}{meant}; known: {', '.join(sorted(table))}. "
            f"Your own needs @{decorator}({str(name)!r}) in a module that "
            "actor_rollout_ref.model.external_lib names"
        )
    return fn
