"""What options become when the parts of a run are made."""

from __future__ import annotations

import pytest

from slipstream.config import Hardware, load_config
from slipstream.loops.build import engine_settings
from tests.inference.helpers import shared_decoder

CPU = Hardware(gpus=0, cpus=2)
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "frees"),
    [
        ([], False),
        ([f"{ROLLOUT}.free_cache_engine=true"], True),
        # Kept prefixes need what the store leaves of the budget.
        ([f"{ROLLOUT}.enable_prefix_caching=true"], True),
        ([f"{ROLLOUT}.enable_prefix_caching=true", f"{ROLLOUT}.free_cache_engine=false"], False),
    ],
)
def test_on_a_cpu_keys_and_values_stay_unless_others_need_the_memory(
    overrides: list[str], frees: bool
) -> None:
    config = load_config(overrides, recipe="tiny", hardware=CPU)
    assert engine_settings(config, shared_decoder().config).free_cache_engine is frees
