"""Token budgets, the KV cache and sandboxes that the options give."""

from __future__ import annotations

import pytest

from slipstream.build import sandbox as build_sandbox
from slipstream.build.engine import engine_settings
from slipstream.build.limits import branches_fit, check_budgets
from slipstream.config import Hardware, load_config
from slipstream.errors import ConfigError
from slipstream.rewards.sandbox.fusion import FusionSandbox
from slipstream.rewards.sandbox.local import BubblewrapSandbox, UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import ProgramLimits
from tests.inference.helpers import shared_decoder

CPU = Hardware(gpus=0)
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=50", "actor_rollout_ref.actor"),
        ("critic.ppo_max_token_len_per_gpu=50", "critic"),
        ("sft.max_tokens_per_micro_batch=50", "sft"),
    ],
)
def test_token_budget_below_one_padded_sequence_is_refused(
    monkeypatch: pytest.MonkeyPatch, override: str, key: str
) -> None:
    model = shared_decoder().config
    config = load_config(
        [
            "algorithm.adv_estimator=gae",
            "data.max_prompt_length=20",
            "data.max_response_length=30",
            "sft.max_length=50",
            override,
        ],
        recipe="tiny",
        hardware=CPU,
    )
    # Packed sequences have no padding.
    check_budgets(config, model, "sft+rl")
    monkeypatch.setattr("slipstream.build.limits.supports_varlen", lambda *_: False)
    with pytest.raises(ConfigError, match=rf"^{key}\..*=50 cannot hold .* of 50 .* has 64 tokens"):
        check_budgets(config, model, "sft+rl")


@pytest.mark.parametrize(
    ("overrides", "frees"),
    [
        ([], False),
        ([f"{ROLLOUT}.free_cache_engine=true"], True),
        # Cached prefixes use the rest of the budget.
        ([f"{ROLLOUT}.enable_prefix_caching=true"], True),
        ([f"{ROLLOUT}.enable_prefix_caching=true", f"{ROLLOUT}.free_cache_engine=false"], False),
    ],
)
def test_kv_cache_is_freed_on_a_cpu_only_for_prefix_caching_or_on_request(
    overrides: list[str], frees: bool
) -> None:
    config = load_config(overrides, recipe="tiny", hardware=CPU)
    assert engine_settings(config, shared_decoder().config).free_cache_engine is frees


def test_sandbox_and_its_limits_follow_the_settings() -> None:
    def sandbox(*overrides: str) -> object:
        config = load_config(list(overrides), recipe="tiny", notify=lambda _: None)
        return build_sandbox.make_sandbox(config)

    isolated = sandbox("reward_model.sandbox.run_timeout_s=3", "reward_model.sandbox.files_mb=5")
    assert isinstance(isolated, BubblewrapSandbox)
    # The deadline of a scoring call, 30 s, minus one run of 3 s and two seconds.
    wanted = ProgramLimits(run_timeout_s=3.0, total_timeout_s=25.0, files_mb=5)
    assert isolated._limits == wanted
    bare = sandbox("reward_model.sandbox.run_untrusted_code_without_isolation=true")
    assert isinstance(bare, UnisolatedSandbox)
    service = sandbox(
        "reward_model.sandbox_fusion.url=http://localhost:1/run_code",
        "reward_model.sandbox_fusion.memory_limit_mb=77",
    )
    assert isinstance(service, FusionSandbox)
    assert service._limits.memory_mb == 77


@pytest.mark.parametrize(
    ("overrides", "fitting", "too_much"),
    [
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"], [32, 20], [32, 20, 1]),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=false",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            ],
            [900, 20],
            [1, 1, 1],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=64"],
            [32, 20],
            [32, 20, 1],
        ),
        (
            [
                "algorithm.adv_estimator=gae",
                "critic.use_dynamic_bsz=false",
                "critic.ppo_micro_batch_size_per_gpu=2",
            ],
            [900, 20],
            [1, 1, 1],
        ),
    ],
)
def test_branches_fit_into_a_micro_batch(
    overrides: list[str], fitting: list[int], too_much: list[int]
) -> None:
    fit = branches_fit(load_config(overrides, recipe="tiny", hardware=CPU))
    assert fit(fitting)
    assert not fit(too_much)
