"""GDPO against values computed by hand, and the two ways to pass components."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.algorithms import AdvantageConfig
from tests.algorithms.advantages.helpers import estimate, per_row, plain

CASE = replace(
    plain([0.0, 0.0], "aa"),
    by_std=False,
    reward_parts={"right": [1.0, 0.0], "short": [0.0, 8.0]},
    part_weights=[1.0, 0.25],
)


def test_components_are_normalized_before_they_are_added() -> None:
    # Centered 0.5 and -4; weighted 0.5 - 1 = -0.5 and 0.5; variance 6 * 0.25 / 5.
    scale = (0.3 + 1e-8) ** 0.5
    assert per_row("gdpo", CASE) == pytest.approx([-0.5 / scale, 0.5 / scale])
    # Divided by their standard deviations, components with equal weights cancel.
    even = replace(CASE, by_std=True, part_weights=None)
    assert per_row("gdpo", even) == pytest.approx([0.0, 0.0], abs=1e-2)


def test_accepts_verls_object_arrays() -> None:
    arrays = {k: np.array(v, dtype=object) for k, v in CASE.reward_parts.items()}
    advantages, _ = estimate("gdpo", CASE, reward_parts=None, non_tensor_batch=arrays, batch={})
    assert torch.equal(advantages, estimate("gdpo", CASE)[0])


def test_group_keys_may_be_a_tensor() -> None:
    parts = {"right": [1.0, 0.0, 0.0, 1.0], "short": [0.0, 8.0, 4.0, 2.0]}
    case = replace(plain([0.0] * 4, "abab"), reward_parts=parts)
    found = estimate("gdpo", case, index=torch.tensor([7, 5, 7, 5]))[0]
    assert torch.equal(found, estimate("gdpo", case)[0])


def test_group_of_one_has_its_raw_components() -> None:
    case = replace(plain([0.0] * 3, "abb"), reward_parts={"right": [4.0, 0.0, 2.0]}, by_std=False)
    scale = (4.75 + 1e-8) ** 0.5
    assert per_row("gdpo", case) == pytest.approx([8 / 3 / scale, -7 / 3 / scale, -1 / 3 / scale])


def test_components_must_be_named_and_present() -> None:
    with pytest.raises(ValueError, match=r"needs algorithm\.gdpo_reward_keys.*of right, short"):
        estimate("gdpo", CASE, config=AdvantageConfig())
    with pytest.raises(ValueError, match=r"names 'kind', which .* returned right, short"):
        estimate("gdpo", CASE, config=AdvantageConfig(gdpo_reward_keys=["kind"]))


def test_errors_name_the_invalid_component() -> None:
    with pytest.raises(ValueError, match="'short': the score of row 1 is nan"):
        estimate("gdpo", replace(CASE, reward_parts={"right": [1, 0], "short": [0, float("nan")]}))
    with pytest.raises(ValueError, match=r"'right': .*one group key per row"):
        estimate("gdpo", replace(CASE, reward_parts={"right": [1], "short": [0, 0]}))
