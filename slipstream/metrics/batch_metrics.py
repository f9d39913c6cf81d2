"""Statistics of groups of samples and of right and wrong answers: pure functions.

Knows nothing of where samples come from; reads only the carriers. Called by the loops.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.errors import DataError
from slipstream.metrics.resampled import best_and_worst, majority, subset_sizes
from slipstream.types import Group, Sample, Status

MOST_REASONS = 8
"""Kinds of failures that a step counts apart."""

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

_T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""The same of Student's t with 1, 2, ... degrees of freedom."""


def summary(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """`prefix/{mean,max,min}` of `values`; nothing of an empty sequence."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    return {
        f"{prefix}/mean": math.fsum(numbers) / len(numbers),
        f"{prefix}/max": max(numbers),
        f"{prefix}/min": min(numbers),
    }


def rollout_metrics(
    groups: Sequence[Group], *, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """What one step's rollouts look like, in the names of `names.METRICS`.

    Scores leave failed samples out; lengths, turns and ratios count every sample. As in VERL a
    response (prompt) is clipped when it has the maximal length. A turn is the prompt or a run of
    segments of one role. Zero variance: two or more scored samples in the group, all of one score.
    Failures that were scored zero count as failed, too. A statistic of nothing is left out. Raises
    DataError where there is no sample at all.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise DataError(
            f"no sample in {len(groups)} groups: nothing to measure; check the rollout filters and "
            "the failures before this step"
        )
    lengths = [sample.response_length for sample in samples]
    prompts = [len(sample.prompt_ids) for sample in samples]
    scored = [sample for sample in samples if sample.status != Status.FAILED]
    count = len(samples)

    metrics = summary("critic/score", (sample.reward for sample in scored))
    # The part "score" is the reward itself.
    for part in sorted({name for sample in scored for name in sample.reward_parts} - {"score"}):
        values = [s.reward_parts[part] for s in scored if part in s.reward_parts]
        metrics |= summary(f"reward/{part}", values)
    metrics |= summary("response_length", lengths)
    metrics["response_length/median"] = float(np.percentile(lengths, 50))
    metrics["response_length/p90"] = float(np.percentile(lengths, 90))
    metrics["response_length/clip_ratio"] = _share(n >= max_response_length for n in lengths)
    metrics["response/aborted_ratio"] = _share(s.status == Status.ABORTED for s in samples)
    metrics |= summary("prompt_length", prompts)
    metrics["prompt_length/clip_ratio"] = _share(n >= max_prompt_length for n in prompts)
    metrics |= summary("num_turns", (_num_turns(sample) for sample in samples))
    metrics["rollout/num_prompts"] = float(len(groups))
    metrics["rollout/num_samples"] = float(count)
    tails = [tail for group in groups if (tail := _longest_over_median(group)) is not None]
    if tails:
        metrics["rollout/longest_over_median"] = math.fsum(tails) / len(tails)
    metrics["training/num_zero_variance_groups"] = float(sum(map(_zero_variance, groups)))
    metrics["training/num_failed_rewards"] = float(sum(map(_failed, samples)))
    for reason, number in failures_by_reason(samples).items():
        metrics[f"training/num_failed_rewards/{reason}"] = float(number)
    metrics["perf/total_num_tokens"] = float(sum(lengths) + sum(prompts))
    return metrics


def failures_by_reason(samples: Sequence[Sample]) -> Counter[str]:
    """How many of `samples` failed, by the first words of the reason, as a name.

    Of more than `MOST_REASONS` the rarest are counted together, as `other`.
    """
    texts = [s.failure or s.metadata.get("reward_failure") or "" for s in samples if _failed(s)]
    found = Counter(reason_name(text) for text in texts)
    if len(found) <= MOST_REASONS:
        return found
    kept = Counter(dict(found.most_common(MOST_REASONS)))
    kept["other"] += found.total() - kept.total()
    return kept


def reason_name(text: str) -> str:
    """`no answer within 30 s` -> `no_answer_within_s`: a reason as part of a metric's name, with
    no more than the kind of an error."""
    words = re.findall(r"[a-z]+", text.split(":")[0].lower())
    return "_".join(words[:6]) or "no_reason_given"


def validation_metrics(
    groups: Sequence[Group], *, max_response_length: int | None = None
) -> dict[str, float]:
    """Accuracy per data source with its interval, in VERL's `val-core` and `val-aux` names.

    A sample's accuracy is its reward part `acc` where there is one, else its reward; a failed
    sample counts 0. With N responses per prompt: mean@N and std@N; for the powers of two below N,
    and N, pass@k, the exact expectation of the best of k drawn without replacement (for right and
    wrong the unbiased estimate of Chen et al., 2021), and VERL's best@k and worst@k, which are
    drawn with replacement (`resampled`); maj@k of the same draws where the reward function tells
    the answers that it read (`pred`). The interval is Wilson's, each prompt one trial: with
    N > 1 it is wider than needed, never too narrow; for accuracies outside [0, 1] it is left out.
    Raises DataError where prompts of one source have different numbers of responses.
    """
    metrics: dict[str, float] = {}
    for source in sorted({group.prompt.data_source for group in groups}):
        chosen = [group for group in groups if group.prompt.data_source == source]
        metrics |= _validation_of(source or "unknown", chosen, max_response_length)
    return metrics


def accuracy_interval(
    correct: Sequence[bool] | Sequence[float], *, z: float = Z_95
) -> tuple[float, float, float]:
    """`(accuracy, low, high)`: Wilson's score interval (1927), 95 % by default.

    `correct`: one entry per independent trial, in [0, 1]. A fraction (the mean over one prompt's
    responses) has no more variance than a right-or-wrong of that mean, so the interval covers.
    Raises DataError without trials or outside [0, 1].
    """
    values = [float(value) for value in correct]
    n = len(values)
    if n == 0:
        raise DataError("the accuracy of no answers is undefined; evaluate at least one prompt")
    if min(values) < 0.0 or max(values) > 1.0:
        raise DataError(
            f"accuracies lie in [0, 1], got [{min(values)}, {max(values)}]; pass right or wrong"
        )
    p = math.fsum(values) / n
    scale = 1.0 + z * z / n
    center = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 a bound is p itself up to rounding.
    return p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """`(mean, low, high)` of independent `values`, such as the accuracies of several trainings:
    Student's 95 % interval (1908), of more than 31 the normal one. Raises DataError for fewer than
    two."""
    n = len(values)
    if n < 2:
        raise DataError(f"a mean of {n} has no interval; give two values or more")
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = (_T_95[n - 2] if n - 2 < len(_T_95) else Z_95) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def paired_difference(
    a: Sequence[bool], b: Sequence[bool], *, resamples: int = 10_000, seed: int = 42
) -> tuple[float, float, float]:
    """`(difference, low, high)` of accuracy b minus a on the same prompts, 95 % bootstrap.

    Prompts are drawn with replacement `resamples` times and the 2.5 and 97.5 percentiles taken.
    Pairs differ by -1, 0 or 1, so a resample is one multinomial draw of how many of each there are:
    the same law as drawing prompts one by one. Raises DataError for unequal or empty sequences.
    """
    if len(a) != len(b) or not a:
        raise DataError(
            f"a paired difference needs the same prompts on both sides, got {len(a)} and {len(b)}"
        )
    n = len(a)
    worse = sum(1 for x, y in zip(a, b, strict=True) if x and not y)
    better = sum(1 for x, y in zip(a, b, strict=True) if y and not x)
    shares = [worse / n, better / n, (n - worse - better) / n]
    draws = np.random.default_rng(seed).multinomial(n, shares, size=resamples)
    low, high = np.percentile((draws[:, 1] - draws[:, 0]) / n, [2.5, 97.5])
    return (better - worse) / n, float(low), float(high)


def _validation_of(
    source: str, groups: Sequence[Group], max_response_length: int | None
) -> dict[str, float]:
    counts = {len(group.samples) for group in groups}
    if len(counts) != 1 or counts == {0}:
        raise DataError(
            f"validation of {source!r} needs the same number of responses for each prompt, got "
            f"{sorted(counts)}"
        )
    (n,) = counts
    rows = [[_accuracy(sample) for sample in group.samples] for group in groups]
    means = [math.fsum(row) / n for row in rows]
    core, aux = f"val-core/{source}/acc", f"val-aux/{source}"
    metrics = {f"{core}/mean@{n}": math.fsum(means) / len(means)}
    if all(0.0 <= mean <= 1.0 for mean in means):
        _, low, high = accuracy_interval(means)
        metrics[f"{aux}/acc/mean@{n}/ci_low"] = low
        metrics[f"{aux}/acc/mean@{n}/ci_high"] = high
    answers = [[_answer(sample) for sample in group.samples] for group in groups]
    told = any(answer for row in answers for answer in row)
    for k in subset_sizes(n):
        best = [_best_of(row, k) for row in rows]
        metrics[f"{aux}/acc/pass@{k}"] = math.fsum(best) / len(best)
        drawn = best_and_worst(rows, k) | (majority(rows, answers, k) if told else {})
        for name, value in drawn.items():
            # VERL's core has what is drawn of all of them.
            core_one = k == n and name in (f"best@{n}/mean", f"maj@{n}/mean")
            metrics[f"{core if core_one else f'{aux}/acc'}/{name}"] = value
    if n > 1:
        metrics[f"{aux}/acc/std@{n}"] = math.fsum(map(float, np.std(rows, axis=1))) / len(rows)
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_length for sample in samples]
    metrics[f"{aux}/num_prompts"] = float(len(groups))
    metrics[f"{aux}/num_failed"] = float(sum(map(_failed, samples)))
    metrics[f"{aux}/response_length/mean"] = sum(lengths) / len(lengths)
    metrics[f"{aux}/response_length/max"] = float(max(lengths))
    if max_response_length is not None:
        clipped = _share(length >= max_response_length for length in lengths)
        metrics[f"{aux}/response_length/clip_ratio"] = clipped
    return metrics


def _failed(sample: Sample) -> bool:
    """Failed for good, or scored zero in place of a failure (see `rewards.protocol`)."""
    return sample.status == Status.FAILED or "reward_failure" in sample.metadata


def _accuracy(sample: Sample) -> float:
    if sample.status == Status.FAILED:
        return 0.0
    return float(sample.reward_parts.get("acc", sample.reward))


def _answer(sample: Sample) -> str:
    """What the reward function read as the answer (see `rewards.protocol`); empty
    where it told none."""
    return str(sample.metadata.get("pred", ""))


def _best_of(values: Sequence[float], k: int) -> float:
    """Expected maximum of k of `values`, drawn without replacement."""
    ordered = sorted(values)
    total = math.comb(len(ordered), k)
    # Entry i is the maximum of as many draws as there are ways to choose the other k - 1 below it.
    terms = (value * math.comb(i, k - 1) / total for i, value in enumerate(ordered) if i >= k - 1)
    return math.fsum(terms)


def _longest_over_median(group: Group) -> float | None:
    lengths = [sample.response_length for sample in group.samples]
    median = float(np.median(lengths)) if lengths else 0.0
    return max(lengths) / median if median > 0 else None


def _zero_variance(group: Group) -> bool:
    scores = [sample.reward for sample in group.samples if sample.status != Status.FAILED]
    return len(scores) > 1 and all(score == scores[0] for score in scores)


def _num_turns(sample: Sample) -> int:
    roles = [segment.role for segment in sample.segments if segment.ids]
    return sum(1 for i, role in enumerate(roles) if i == 0 or role != roles[i - 1])


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
