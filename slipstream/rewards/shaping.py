"""How a response is written, not what it answers: terms of a sum of rewards.

Pure functions of a sample, or of all samples of a group once they are scored, with their settings
as keywords. Named in `reward_model.terms`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from slipstream.errors import ConfigError
from slipstream.types import Sample, StopReason

_OPEN, _CLOSE = "<think>", "</think>"

_WORD = re.compile(r"\S+")


def think_format(sample: Sample, *, prompted: bool = False) -> float:
    """1.0 where the response is `<think>`, thoughts, `</think>` and an answer, once each; else 0.0
    (DeepSeek-R1). `prompted`: the prompt has opened the block already, so the response does not.
    """
    text = sample.response.lstrip()
    if not prompted:
        if not text.startswith(_OPEN):
            return 0.0
        text = text[len(_OPEN) :]
    thoughts, closed, answer = text.partition(_CLOSE)
    whole = closed and thoughts.strip() and answer.strip()
    again = _OPEN in text or _CLOSE in answer
    return 1.0 if whole and not again else 0.0


def repetition(sample: Sample, *, ngram: int = 3) -> float:
    """Minus the share of the response's n-grams of words that it had before: 0.0 where all are
    different, towards -1.0 where it says one thing again and again (Yeo et al. 2025).

    Raises ConfigError for `ngram` below 1.
    """
    if ngram < 1:
        raise ConfigError(f"reward_model.terms: repetition has ngram={ngram}; set 1 or more")
    words = [word.lower() for word in _WORD.findall(sample.response)]
    count = len(words) - ngram + 1
    if count < 1:
        return 0.0
    different = {tuple(words[i : i + ngram]) for i in range(count)}
    return len(different) / count - 1.0


def overlong(sample: Sample, *, max_resp_len: int, buffer: int) -> float:
    """DAPO's soft penalty (Yu et al. 2025, eq. 13): 0.0 up to `max_resp_len - buffer` tokens, then
    down to -1.0 at `max_resp_len`, and -1.0 beyond.

    Raises ConfigError where `buffer` is not between 1 and `max_resp_len`.
    """
    if not 1 <= buffer <= max_resp_len:
        raise ConfigError(
            f"reward_model.terms: overlong has buffer={buffer} and max_resp_len={max_resp_len}; "
            "set a buffer between 1 and that"
        )
    over = sample.response_length - (max_resp_len - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


def cosine_length(
    samples: Sequence[Sample],
    *,
    max_resp_len: int,
    short_right: float = 1.0,
    long_right: float = 0.5,
    short_wrong: float = -1.0,
    long_wrong: float = -0.5,
) -> list[float]:
    """What responses are worth by their length, from that of an empty one to that of one of
    `max_resp_len` tokens, along half a cosine (Yeo et al. 2025): right answers should be short, and
    wrong ones have thought for longer. One that was cut off is wrong, and as long as can be.
    """

    def one(sample: Sample) -> float:
        cut = sample.stop_reason is StopReason.LENGTH
        share = 1.0 if cut else min(sample.response_length / max_resp_len, 1.0)
        right = is_right(sample) and not cut
        short, long = (short_right, long_right) if right else (short_wrong, long_wrong)
        return long + 0.5 * (short - long) * (1.0 + math.cos(share * math.pi))

    return [one(sample) for sample in samples]


def relative_length(samples: Sequence[Sample]) -> list[float]:
    """0.5 for the shortest of a group down to -0.5 for the longest, and at most 0.0 for wrong ones
    (Kimi k1.5, section 2.3.3). All 0.0 where they are equally long."""
    lengths = [sample.response_length for sample in samples]
    least, most = min(lengths), max(lengths)
    if least == most:
        return [0.0] * len(samples)
    shares = [0.5 - (length - least) / (most - least) for length in lengths]
    return [
        share if is_right(sample) else min(share, 0.0)
        for sample, share in zip(samples, shares, strict=True)
    ]


def is_right(sample: Sample) -> bool:
    """Whether a scored sample's answer is right, and not in part."""
    return sample.reward_parts.get("acc", sample.reward) >= 1.0


ANSWER = "answer"
"""The part of a sum that the reward function gives."""

OF_SAMPLES: dict[str, Callable[..., float]] = {
    "think_format": think_format,
    "repetition": repetition,
    "overlong": overlong,
}
OF_GROUPS: dict[str, Callable[..., list[float]]] = {
    "cosine_length": cosine_length,
    "relative_length": relative_length,
}
"""By the names that `reward_model.terms` knows. Those of groups see the other terms' scores."""
