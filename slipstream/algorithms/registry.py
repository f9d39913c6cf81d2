"""Registries of advantage estimators and policy losses, by VERL's names.

`build` looks functions up by the configured names. Users register their own functions with the
decorators, in the module named by `actor_rollout_ref.model.external_lib` or in any module that is
imported earlier.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import Any, TypeVar, cast

from torch import Tensor

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""`(*, token_level_rewards, response_mask, index, config) -> (advantages, returns)`.

`token_level_rewards` and `response_mask` are (B, T), `index` has B group keys (the prompts' uids),
`config` is an `AdvantageConfig`. `AdvantageNeed` lists further inputs of estimators. Both results
are (B, T), 0 where masked, in float64 if the rewards are, else float32. Estimators are called with
keywords only, on the whole batch. Later versions may add keywords, so user functions should accept
`**kwargs`.
"""

LossMetrics = dict[str, Tensor | float]
"""Detached scalars of one micro-batch. Their sum over micro-batches is the mini-batch's value."""

PolicyLossFn = Callable[..., tuple[Tensor, LossMetrics]]
"""`(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
-> (loss, metrics)`.

All tensors are (B, T); `config` is a `PolicyLossConfig`; `rollout_is_weights` may be None. The loss
is a scalar and linear in rows, given `config.normalizers`, so that micro-batches add up.
"""

PolicyLossSelection = Callable[..., Tensor]
"""`(old_log_prob, log_prob, advantages, response_mask, config, *, hashes=None) -> selected`.

Selects the tokens that a loss treats differently. It is called once over a whole mini-batch and all
ranks, before its micro-batches. All tensors are (B, T), the result is bool. `hashes` are int64, as
computed by `token_hashes`. The result depends only on the values at target tokens, not on their
positions, so ranks may gather their target tokens into one row (1, N).
"""

_Fn = TypeVar("_Fn", bound=Callable[..., object])


class AdvantageEstimator(StrEnum):
    """The built-in estimators."""

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
    """Inputs that an estimator can request in addition to rewards, mask and group keys. The value
    is the keyword."""

    VALUES = "values"
    """The critic's values (B, T)."""
    REWARD_BASELINES = "reward_baselines"
    """Scores (B,) of the prompts' greedy responses."""
    OLD_LOG_PROBS = "old_log_probs"
    """Log-probs (B, T) under the policy before the update."""
    REF_LOG_PROBS = "ref_log_probs"
    """Log-probs (B, T) under the reference model."""
    SUM_PI_SQUARED = "sum_pi_squared"
    """Sums of squared probabilities over the vocabulary (B, T), under the policy before the
    update."""
    ROLLOUT_IS_WEIGHTS = "rollout_is_weights"
    """Importance weights of the rollout correction (B, T). The only optional input: it is passed
    only if there are weights."""
    REWARD_PARTS = "reward_parts"
    """Named components of the rewards: name -> (B,)."""


class RegistryError(ValueError):
    """A name is unknown, or another function has it."""


_ADVANTAGES: dict[str, AdvantageFn] = {}
_NEEDS: dict[str, frozenset[AdvantageNeed]] = {}
_POLICY_LOSSES: dict[str, PolicyLossFn] = {}
_SELECTIONS: dict[PolicyLossFn, PolicyLossSelection] = {}


def register_adv_est(
    name_or_enum: str | Enum, *, needs: Iterable[AdvantageNeed] = ()
) -> Callable[[_Fn], _Fn]:
    """Decorator that registers an `AdvantageFn` for `algorithm.adv_estimator=<name>`.

    The name is text, or a member of an `Enum` whose value is the text. The caller passes each of
    `needs` as a keyword.

    Raises:
        RegistryError: another function has the name, or the name is not text.
        ValueError: a need is not an `AdvantageNeed`.
    """
    key, needed = registered_name(name_or_enum), frozenset(AdvantageNeed(need) for need in needs)
    register = _register(_ADVANTAGES, "advantage estimator", key)

    def decorate(fn: _Fn) -> _Fn:
        register(fn)
        _NEEDS[key] = needed
        return fn

    return decorate


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """The estimator registered under this name, or under its spelling with `_plus_plus` for `++`
    and `_` for `-`.

    Raises:
        RegistryError: the name is unknown; the message lists the known names.
    """
    name = registered_name(name_or_enum)
    return _lookup(_ADVANTAGES, "advantage estimator", "register_adv_est", name)


def adv_needs(name: str | Enum) -> frozenset[AdvantageNeed]:
    """The inputs that the estimator `name` needs in addition to rewards, mask, group keys and
    config.

    Raises:
        RegistryError: the name is unknown.
    """
    get_adv_estimator_fn(name)
    return _NEEDS.get(registered_name(name), frozenset())


def register_policy_loss(
    name: str | Enum, *, select: PolicyLossSelection | None = None
) -> Callable[[_Fn], _Fn]:
    """Decorator that registers a `PolicyLossFn` for
    `actor_rollout_ref.actor.policy_loss.loss_mode=<name>`.

    `name` is text, or a member of an `Enum` whose value is the text. `select` is for losses that
    treat some tokens of the mini-batch differently. The trainer calls it once over the whole
    mini-batch, and passes each micro-batch its part as `config.selected`.

    Raises:
        RegistryError: another function has the name (VERL overwrites silently, so that the last
            import decides), or the name is not text.
    """
    register = _register(_POLICY_LOSSES, "policy loss", name)

    def decorate(fn: _Fn) -> _Fn:
        register(fn)
        if select is not None:
            _SELECTIONS[cast(PolicyLossFn, fn)] = select
        return fn

    return decorate


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """The policy loss registered as `name`.

    Raises:
        RegistryError: the name is unknown; the message lists the known names.
    """
    return _lookup(_POLICY_LOSSES, "policy loss", "register_policy_loss", name)


def policy_loss_selection(name: str | Enum) -> PolicyLossSelection | None:
    """The function that selects tokens for the policy loss `name`; None if it needs none.

    Raises:
        RegistryError: the name is unknown; the message lists the known names.
    """
    return _SELECTIONS.get(get_policy_loss_fn(name))


def adv_estimator_names() -> tuple[str, ...]:
    """The names of all registered estimators, sorted."""
    return tuple(sorted(_ADVANTAGES))


def policy_loss_names() -> tuple[str, ...]:
    """The names of all registered policy losses, sorted."""
    return tuple(sorted(_POLICY_LOSSES))


def registered_name(name: str | Enum) -> str:
    """The registered spelling of `name` if it is another spelling of a known estimator, else `name`
    itself."""
    text = _text(name)
    other = text.replace("++", "_plus_plus").replace("-", "_")
    return other if text not in _ADVANTAGES and other in _ADVANTAGES else text


def _text(name: object) -> str:
    value = name.value if isinstance(name, Enum) else name
    if not isinstance(value, str):
        raise RegistryError(
            f"the name of an estimator or a loss must be text, or an Enum member whose value is "
            f'text, got {name!r}; write @register_adv_est("my_name"), for example'
        )
    return value


def _register(table: dict[str, Any], kind: str, name: str | Enum) -> Callable[[_Fn], _Fn]:
    key = _text(name)

    def decorate(fn: _Fn) -> _Fn:
        known = table.setdefault(key, fn)
        if known is not fn:
            raise RegistryError(
                f"{kind} {key!r} is already registered by "
                f"{getattr(known, '__module__', '?')}.{getattr(known, '__qualname__', known)}; "
                f"use another name"
            )
        return fn

    return decorate


def _lookup(table: dict[str, _Fn], kind: str, decorator: str, name: str | Enum) -> _Fn:
    key = _text(name)
    fn = table.get(key)
    if fn is None:
        near = difflib.get_close_matches(key, table, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise RegistryError(
            f"unknown {kind} {key!r}{meant}; known: {', '.join(sorted(table))}. "
            f"Register your own with @{decorator}({key!r}) in a module, and set "
            "actor_rollout_ref.model.external_lib to that module"
        )
    return fn
