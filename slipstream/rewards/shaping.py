"""Reward terms that judge how a response is written, not whether its answer is correct.

They are pure functions of a sample, or of all scored samples of a group. Their settings are
keyword arguments. Used in `reward_model.terms`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from slipstream.errors import ConfigError
from slipstream.rewards.protocol import SCORE_PART
from slipstream.types import Sample, StopReason

_OPEN, _CLOSE = "<think>", "</think>"

_WORD = re.compile(r"\S+")


def think_format(sample: Sample, *, prompted: bool = False) -> float:
    """Return 1.0 if the response is `<think>` thoughts `</think>` answer, else 0.0 (DeepSeek-R1).

    Each tag must occur once, and thoughts and answer must not be empty. `prompted`: the prompt
    already ends with `<think>`, so the response must not contain it.
    """
    text = sample.response.lstrip()
    if not prompted:
        if not text.startswith(_OPEN):
            return 0.0
        text = text[len(_OPEN) :]
    thoughts, closed, answer = text.partition(_CLOSE)
    complete = closed and thoughts.strip() and answer.strip()
    repeated = _OPEN in text or _CLOSE in answer
    return 1.0 if complete and not repeated else 0.0


def repetition(sample: Sample, *, ngram: int = 3) -> float:
    """Return minus the share of repeated word n-grams of the response (Yeo et al. 2025).

    0.0 if all n-grams are different, close to -1.0 if it repeats one text over and over. Raises
    ConfigError for `ngram` below 1.
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
    """Return DAPO's soft length penalty (Yu et al. 2025, eq. 13).

    0.0 up to `max_resp_len - buffer` tokens, then linearly down to -1.0 at `max_resp_len`, and -1.0
    beyond. Raises ConfigError if `buffer` is not between 1 and `max_resp_len`.
    """
    if not 1 <= buffer <= max_resp_len:
        raise ConfigError(
            f"reward_model.terms: overlong has buffer={buffer} and max_resp_len={max_resp_len}; "
            "set a buffer between 1 and max_resp_len"
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
    """Return rewards that depend on response length along half a cosine (Yeo et al. 2025).

    Values go from `short_*` for an empty response to `long_*` for `max_resp_len` tokens. With the
    defaults, correct answers should be short, and wrong answers long, after more thinking. A
    response cut off at the length limit counts as wrong and as long as possible.
    """

    if not max_resp_len >= 1:
        raise ConfigError(
            f"reward_model.terms: cosine_length has max_resp_len={max_resp_len}; set 1 or more"
        )

    def one(sample: Sample) -> float:
        cut = sample.stop_reason is StopReason.LENGTH
        share = 1.0 if cut else min(sample.response_length / max_resp_len, 1.0)
        right = is_right(sample) and not cut
        short, long = (short_right, long_right) if right else (short_wrong, long_wrong)
        return long + 0.5 * (short - long) * (1.0 + math.cos(share * math.pi))

    return [one(sample) for sample in samples]


def relative_length(samples: Sequence[Sample]) -> list[float]:
    """Return 0.5 for the shortest response of a group, down to -0.5 for the longest.

    At most 0.0 for wrong answers (Kimi k1.5, section 2.3.3). All 0.0 if the lengths are equal.
    """
    lengths = [sample.response_length for sample in samples]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(samples)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [
        share if is_right(sample) else min(share, 0.0)
        for sample, share in zip(samples, shares, strict=True)
    ]


def is_right(sample: Sample) -> bool:
    """Return whether a scored sample's answer is fully correct."""
    parts = sample.reward_parts
    # The score has no rewards of turns.
    return parts.get("acc", parts.get(SCORE_PART, sample.reward)) >= 1.0


ANSWER = "answer"
"""Name of the term that is the reward function's own score."""

OF_SAMPLES: dict[str, Callable[..., float]] = {
    "think_format": think_format,
    "repetition": repetition,
    "overlong": overlong,
}
OF_GROUPS: dict[str, Callable[..., list[float]]] = {
    "cosine_length": cosine_length,
    "relative_length": relative_length,
}
"""Terms by their names in `reward_model.terms`. Group terms see the scores of the other terms."""
