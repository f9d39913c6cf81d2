"""Reward terms about form and length match values calculated by hand."""

from __future__ import annotations

import math

import pytest

from slipstream.errors import ConfigError
from slipstream.rewards.shaping import (
    cosine_length,
    is_right,
    overlong,
    relative_length,
    repetition,
    think_format,
)
from slipstream.types import Sample, Segment, StopReason


def response(text: str = "", tokens: int = 0, answer: float = 0.0, cut: bool = False) -> Sample:
    return Sample(
        segments=[Segment.given("prompt", [1]), Segment.given("assistant", [2] * tokens)],
        response=text,
        reward_parts={"acc": answer},
        stop_reason=StopReason.LENGTH if cut else StopReason.EOS,
    )


@pytest.mark.parametrize(
    ("text", "alone", "prompted"),
    [
        ("<think>so</think>7", 1.0, 0.0),
        ("so</think>7", 0.0, 1.0),
        ("  \n<think>\nso\n</think>\n\n7", 1.0, 0.0),
        ("<think>so</think>", 0.0, 0.0),
        ("<think>so</think> \n", 0.0, 0.0),
        ("<think></think>7", 0.0, 0.0),
        ("<think> \n</think>7", 0.0, 0.0),
        ("</think>7", 0.0, 0.0),
        ("<think>so 7", 0.0, 0.0),
        ("<think>so<think>so</think>7", 0.0, 0.0),
        ("<think>so</think>7</think>", 0.0, 0.0),
        ("<think>so</think>7<think>so</think>8", 0.0, 0.0),
        ("so </think> 7 </think> 8", 0.0, 0.0),
        ("first <think>so</think>7", 0.0, 0.0),
        ("<Think>so</Think>7", 0.0, 0.0),
        ("<think >so</think >7", 0.0, 0.0),
        ("\uff1cthink\uff1eso\uff1c/think\uff1e7", 0.0, 0.0),
        ("<thinking>so</thinking>7", 0.0, 0.0),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<think>" + "x" * 1_000_000 + "</think>7", 1.0, 0.0),
        ("<think>½ ≠ 1,000 {</think>\\boxed{\\frac{1}{2}}", 1.0, 0.0),
    ],
)
def test_think_format(text: str, alone: float, prompted: float) -> None:
    assert think_format(response(text)) == alone
    assert think_format(response(text), prompted=True) == prompted


@pytest.mark.parametrize(
    ("text", "ngram", "value"),
    [
        ("", 3, 0.0),
        ("a b", 3, 0.0),
        ("a b c", 3, 0.0),
        ("a b c d", 3, 0.0),
        ("a a a a", 3, -1 / 2),
        ("a a a a a a", 3, -3 / 4),
        ("a b a b a b", 2, -3 / 5),
        ("a b c a b c", 3, -1 / 4),
        ("A b C a B c", 3, -1 / 4),
        ("a b a", 1, -1 / 3),
        ("a  b\na\tb", 2, -1 / 3),
        ("a, a, a,", 1, -2 / 3),
        ("a, a", 1, 0.0),
        ("½ ½", 1, -1 / 2),
        ("1 + 1 = 2", 1, -1 / 5),
        ("1 + 1 = 2", 2, 0.0),
        (" ".join("ab" * 500_000), 3, 2 / 999_998 - 1),
        ("word" * 250_000, 1, 0.0),
        ("a b c d e f g h", 8, 0.0),
        ("a b c d e f g h", 9, 0.0),
    ],
)
def test_repetition(text: str, ngram: int, value: float) -> None:
    assert repetition(response(text), ngram=ngram) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (150, -1.0)],
)
def test_overlong(tokens: int, value: float) -> None:
    sample = response(tokens=tokens)
    assert overlong(sample, max_resp_len=100, buffer=20) == pytest.approx(value)


def test_invalid_settings_are_refused() -> None:
    for buffer in (0, 101):
        with pytest.raises(ConfigError, match="set a buffer between 1 and max_resp_len"):
            overlong(response(), max_resp_len=100, buffer=buffer)
    with pytest.raises(ConfigError, match="ngram=0; set 1 or more"):
        repetition(response("a"), ngram=0)


def test_cosine_length() -> None:
    half = 0.5 + 0.25
    samples = [
        *(response(tokens=n, answer=1.0) for n in (0, 50, 100, 200)),
        *(response(tokens=n, answer=a) for n, a in ((0, 0.0), (50, -1.0), (100, 0.0))),
        response(tokens=10, answer=1.0, cut=True),
    ]
    values = cosine_length(samples, max_resp_len=100)
    assert values == pytest.approx([1.0, half, 0.5, 0.5, -1.0, -half, -0.5, -0.5])
    (quarter,) = cosine_length([response(tokens=25, answer=1.0)], max_resp_len=100)
    assert quarter == pytest.approx(0.5 + 0.25 * (1 + math.cos(math.pi / 4)))


def test_relative_length() -> None:
    right = [response(tokens=n, answer=1.0) for n in (10, 20, 30)]
    wrong = [response(tokens=n) for n in (10, 25, 30)]
    assert relative_length([*right, *wrong]) == [0.5, 0.0, -0.5, 0.0, -0.25, -0.5]
    assert relative_length([right[0], wrong[0]]) == [0.0, 0.0]
    assert relative_length(right[:1]) == [0.0]
    # A partially correct answer does not count as correct.
    assert relative_length([response(tokens=10, answer=0.5), *right[1:]]) == [0.0, 0.0, -0.5]


@pytest.mark.parametrize(
    ("reward", "parts", "right"),
    [
        (1.0, {}, True),
        (0.5, {"acc": 1.0}, True),
        # Rewards of turns do not count.
        (0.97, {"score": 1.0, "turn/tool": -0.03}, True),
        (1.25, {"score": 0.0, "turn/tool": 1.25}, False),
    ],
)
def test_a_right_answer_is_right_whatever_its_turns_cost(
    reward: float, parts: dict[str, float], right: bool
) -> None:
    assert is_right(Sample(reward=reward, reward_parts=parts)) == right
