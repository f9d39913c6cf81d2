"""Accuracy of evaluations."""

from __future__ import annotations

import pytest

from slipstream.loops.evaluate import Evaluation
from slipstream.types import Group, Prompt, Sample, Status


@pytest.mark.parametrize(
    ("reward", "parts", "right"),
    [
        (1.0, {}, True),
        (0.0, {}, False),
        (0.5, {"acc": 0.0}, False),
        # Rewards of turns are no accuracy.
        (0.25, {"score": 0.0, "turn/tool": 0.25}, False),
        (-0.5, {"score": 1.0, "turn/tool": -1.5}, True),
    ],
)
def test_accuracy_is_that_of_the_answer(
    reward: float, parts: dict[str, float], right: bool
) -> None:
    sample = Sample(reward=reward, reward_parts=parts, status=Status.COMPLETED)
    group = Group(index=0, prompt=Prompt(uid="q", ids=[1]), samples=[sample])
    evaluation = Evaluation(groups=[group], metrics={})
    assert evaluation.correct == [right]
    assert evaluation.accuracy == float(right)
