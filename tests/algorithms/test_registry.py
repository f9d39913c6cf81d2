"""Registries: lookup by string and enum, errors that list names, and no silent overwriting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import (
    AdvantageConfig,
    AdvantageEstimator,
    AdvantageNeed,
    RegistryError,
    adv_estimator_names,
    adv_needs,
    bypass_mode,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    grpo,
    gspo,
    kl_cov,
    policy_gradient,
    policy_loss_names,
    policy_loss_selection,
    register_adv_est,
    register_policy_loss,
    sapo,
    vanilla,
)
from slipstream.algorithms import registry as registry_module


@pytest.fixture(autouse=True)
def _restore_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_ADVANTAGES", dict(registry_module._ADVANTAGES))
    monkeypatch.setattr(registry_module, "_NEEDS", dict(registry_module._NEEDS))
    monkeypatch.setattr(registry_module, "_POLICY_LOSSES", dict(registry_module._POLICY_LOSSES))
    monkeypatch.setattr(registry_module, "_SELECTIONS", dict(registry_module._SELECTIONS))


def test_estimators_are_found_by_string_and_enum() -> None:
    assert get_adv_estimator_fn("grpo") is grpo
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is grpo
    assert get_adv_estimator_fn("grpo_vectorized") is grpo


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("reinforce++", "reinforce_plus_plus"),
        ("reinforce++-baseline", "reinforce_plus_plus_baseline"),
        ("reinforce++_baseline", "reinforce_plus_plus_baseline"),
        ("reinforce_plus_plus-baseline", "reinforce_plus_plus_baseline"),
        ("reinforce-plus-plus", "reinforce_plus_plus"),
        ("grpo-passk", "grpo_passk"),
        ("optimal-token-baseline", "optimal_token_baseline"),
    ],
)
def test_other_spellings_of_estimators_are_accepted(spelling: str, name: str) -> None:
    assert get_adv_estimator_fn(spelling) is get_adv_estimator_fn(name)
    assert adv_needs(spelling) == adv_needs(name)
    assert spelling not in adv_estimator_names()
    with pytest.raises(RegistryError, match=f"'{name}' is already registered"):
        register_adv_est(spelling)(lambda **_: (torch.zeros(1), torch.zeros(1)))


def test_needs_of_estimators() -> None:
    needs = {name: sorted(adv_needs(name)) for name in adv_estimator_names()}
    baseline = ["old_log_probs", "rollout_is_weights", "sum_pi_squared"]
    assert {name: need for name, need in needs.items() if need} == {
        "gae": ["values"],
        "remax": ["reward_baselines"],
        "gdpo": ["reward_parts"],
        "optimal_token_baseline": baseline,
        "tir_optimal_token_baseline": baseline,
        "on_policy_distillation": ["old_log_probs", "ref_log_probs"],
    }
    with pytest.raises(RegistryError, match="'gea'"):
        adv_needs("gea")


def test_estimator_written_for_verl_can_be_registered() -> None:
    @register_adv_est("theirs")
    def theirs(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        scores = token_level_rewards.sum(-1, keepdim=True) * config.get("gamma", 1.0)
        return scores * response_mask, scores * response_mask

    assert adv_needs("theirs") == frozenset()
    advantages, _ = get_adv_estimator_fn("theirs")(
        token_level_rewards=torch.tensor([[0.0, 2.0]]),
        response_mask=torch.tensor([[1.0, 1.0]]),
        index=["a"],
        config=AdvantageConfig(gamma=0.5),
    )
    assert advantages.tolist() == [[1.0, 1.0]]


def test_user_estimators_can_declare_needs() -> None:
    @register_adv_est("my-own", needs=[AdvantageNeed.VALUES])
    def mine(**kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 1), torch.zeros(1, 1)

    assert adv_needs("my-own") == {AdvantageNeed.VALUES}
    assert get_adv_estimator_fn("my-own") is mine
    with pytest.raises(RegistryError, match=r"'my_own' \(did you mean 'my-own'\?\)"):
        get_adv_estimator_fn("my_own")
    with pytest.raises(ValueError, match="is not a valid AdvantageNeed"):
        register_adv_est("other", needs=["valeus"])  # type: ignore[list-item]


def test_every_enum_member_is_implemented() -> None:
    assert set(AdvantageEstimator) == set(adv_estimator_names())


def test_policy_losses_are_found_under_all_their_names() -> None:
    assert {n: get_policy_loss_fn(n) for n in policy_loss_names()} == {
        "vanilla": vanilla,
        "ppo": vanilla,
        "grpo": vanilla,
        "gpg": policy_gradient,
        "reinforce": policy_gradient,
        "policy_gradient": policy_gradient,
        "gspo": gspo,
        "sapo": sapo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "geo_mean": geo_mean,
        "cispo": cispo,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
        "dro": dro,
        "bypass_mode": bypass_mode,
        "rollout_correction": bypass_mode,
    }


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(
        RegistryError, match=r"'gea' \(did you mean 'gae'\?\); known: gae, gdpo, .*rloo_vectorized"
    ):
        get_adv_estimator_fn("gea")
    with pytest.raises(
        ValueError, match=r"'van' \(did you mean 'vanilla'\?\); known: bypass_mode, "
    ):
        get_policy_loss_fn("van")


def test_user_functions_can_be_registered() -> None:
    @register_adv_est("mine")
    def mine(**kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 1), torch.zeros(1, 1)

    @register_policy_loss("my_loss")
    def my_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor | float]]:
        return torch.zeros(()), {}

    assert get_adv_estimator_fn("mine") is mine
    assert get_policy_loss_fn("my_loss") is my_loss


def test_rejects_a_second_function_with_the_same_name() -> None:
    assert register_adv_est("grpo")(grpo) is grpo
    assert register_policy_loss("vanilla")(vanilla) is vanilla
    with pytest.raises(RegistryError, match=r"'grpo' is already registered by .*advantages\.grpo"):
        register_adv_est(AdvantageEstimator.GRPO)(lambda **_: (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(RegistryError, match=r"'vanilla' is already registered"):
        register_policy_loss("vanilla")(policy_gradient)
    assert get_adv_estimator_fn("grpo") is grpo
    assert get_policy_loss_fn("vanilla") is vanilla


def test_loss_can_register_a_selection() -> None:
    def choose(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.bool)

    @register_policy_loss("choosy", select=choose)
    def choosy(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor | float]]:
        return torch.zeros(()), {}

    assert get_policy_loss_fn("choosy") is choosy
    assert policy_loss_selection("choosy") is choose
    assert policy_loss_selection("vanilla") is None
    with pytest.raises(RegistryError, match=r"'clip-cov' \(did you mean 'clip_cov'\?\)"):
        policy_loss_selection("clip-cov")
