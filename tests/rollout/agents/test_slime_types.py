"""slime's `Sample` keeps its lists of equal length."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.rollout.agents.slime_types import Sample


def meta(end: str) -> dict[str, Any]:
    return {"finish_reason": {"type": end}, "weight_version": "3"}


def test_tokens_of_policy_and_tools_are_appended() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        None, tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta("stop"), text="ab"
    )
    sample.append_response_tokens(None, tokens=[7], trainable=False, text="c")
    assert sample.tokens == [1, 2, 5, 6, 7]
    assert (sample.response, sample.response_length) == ("abc", 3)
    assert sample.loss_mask == [1, 1, 0]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0]
    assert sample.status is Sample.Status.COMPLETED
    assert sample.weight_versions == ["3"]
    assert sample.effective_response_length == 2


def test_a_function_may_keep_the_lists() -> None:
    tokens, mask = [1], list[int]()
    sample = Sample(tokens=tokens, loss_mask=mask)
    sample.append_response_tokens(None, tokens=[5], log_probs=[-1.0])
    sample.append_response_tokens(None, tokens=[6], trainable=False)
    assert (tokens, mask) == ([1, 5, 6], [1, 0])


def test_response_tokens_without_a_mask_are_the_policys() -> None:
    sample = Sample(tokens=[1, 5], response_length=1)
    sample.append_response_tokens(None, tokens=[6], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0], [0.0, 0.0])


@pytest.mark.parametrize(
    ("end", "status"), [("length", "TRUNCATED"), ("abort", "ABORTED"), ("other", "PENDING")]
)
def test_the_answer_sets_the_status(end: str, status: str) -> None:
    sample = Sample()
    sample.append_response_tokens(meta_info=meta("stop"), update_terminal_info=False)
    assert sample.status is Sample.Status.PENDING
    sample.update_from_meta_info(None, meta(end))
    assert sample.status.name == status


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": [1]},
        {"tokens": [1], "log_probs": [-1.0, -1.0]},
        {"tokens": [1], "log_probs": [-1.0], "trainable": False},
    ],
)
def test_log_probs_that_do_not_fit_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="log_probs"):
        Sample().append_response_tokens(None, **given)


def test_the_reward_can_be_a_part() -> None:
    args = type("Arguments", (), {"reward_key": "score"})
    assert Sample(reward=1.0).get_reward_value(args) == 1.0
    assert Sample(reward={"score": 2.0}).get_reward_value(args) == 2.0
