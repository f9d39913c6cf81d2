"""Statistics of groups of samples, and of validation accuracy. All functions are pure.

Does not know where samples come from. Called by the loops.
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

MAX_REASONS = 8
"""Maximum number of failure reasons that a step counts separately."""

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

_T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


def summary(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """Return `prefix/{mean,max,min}` of `values`; empty if there are no values."""
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
    """Return statistics of one step's rollouts, named as in `names.METRICS`.

    Score statistics exclude failed samples; lengths, turns and ratios include all samples. As in
    verl, a response (prompt) counts as clipped if it has the maximum length. A turn is the prompt,
    or consecutive segments of one role. A group has zero variance if it has two or more scored
    samples, and all scores are equal. Failures that were scored 0 count as failed as well.
    Statistics without data are omitted. Raises DataError if there is no sample.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise DataError(
            f"no sample in {len(groups)} groups, so no metrics; check the rollout filters and "
            "the failures before this step"
        )
    lengths = [len(sample.all_response_ids) for sample in samples]
    prompts = [len(sample.branches[0].prompt_ids) for sample in samples]
    scored = [sample for sample in samples if sample.status != Status.FAILED]
    count = len(samples)

    metrics = summary("critic/score", (sample.reward for sample in scored))
    # The reward part "score" is the reward itself, which is already summarized.
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
    metrics |= episode_metrics(samples)
    metrics["rollout/num_prompts"] = float(len(groups))
    metrics["rollout/num_samples"] = float(count)
    tails = [tail for group in groups if (tail := _longest_over_median(group)) is not None]
    if tails:
        metrics["rollout/longest_over_median"] = math.fsum(tails) / len(tails)
    metrics["training/num_zero_variance_groups"] = float(sum(map(_zero_variance, groups)))
    metrics["training/num_failed_rewards"] = float(sum(map(_failed, samples)))
    for reason, number in failures_by_reason(samples).items():
        metrics[f"training/num_failed_rewards/{reason}"] = float(number)
    metrics["perf/total_num_tokens"] = float(
        sum(branch.num_tokens for sample in samples for branch in sample.branches)
    )
    return metrics


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of episodes with an environment that did not fail; empty if there are
    none."""
    kept = [sample for sample in samples if sample.status != Status.FAILED]
    records = [sample.episode for sample in kept if sample.episode is not None]
    if not records:
        return {}
    metrics = summary("episode/turns", (record.turns for record in records))
    metrics |= summary("episode/branches", (len(sample.branches) for sample in kept))
    metrics |= summary("tool_call_counts", (record.calls for record in records))
    metrics |= summary("episode/tool_seconds", (record.tool_seconds for record in records))
    problems, truncated = Counter[str](), Counter[str]()
    for record in records:
        problems.update(record.problems)
        truncated.update([record.truncated_by] if record.truncated_by else [])
    metrics |= {f"episode/problems/{kind}": float(n) for kind, n in sorted(problems.items())}
    metrics |= {f"episode/truncated/{name}": float(n) for name, n in sorted(truncated.items())}
    for name in sorted({name for record in records for name in record.metrics}):
        values = [record.metrics[name] for record in records if name in record.metrics]
        metrics[f"episode/{name}"] = math.fsum(values) / len(values)
    return metrics


def failures_by_reason(samples: Sequence[Sample]) -> Counter[str]:
    """Count the failed samples by reason; a reason is the first words of the error message.

    If there are more than `MAX_REASONS` reasons, the rarest are combined as `other`.
    """
    texts = [s.failure or s.metadata.get("reward_failure") or "" for s in samples if _failed(s)]
    found = Counter(reason_name(text) for text in texts)
    if len(found) <= MAX_REASONS:
        return found
    kept = Counter(dict(found.most_common(MAX_REASONS)))
    kept["other"] += found.total() - kept.total()
    return kept


def reason_name(text: str) -> str:
    """Return a failure reason as part of a metric name, without details such as numbers.

    `no answer within 30 s` -> `no_answer_within_s`. Only the text before the first colon counts.
    """
    words = re.findall(r"[a-z]+", text.split(":")[0].lower())
    return "_".join(words[:6]) or "no_reason_given"


def validation_metrics(
    groups: Sequence[Group], *, max_response_length: int | None = None
) -> dict[str, float]:
    """Return accuracy per data source with its interval, under verl's names `val-core`, `val-aux`.

    The accuracy of a sample is its reward part `acc` if it has one, else its reward; 0 if the
    sample failed. With N responses per prompt the metrics are:

    - mean@N and std@N.
    - pass@k, for k = N and the powers of two below N: the exact expectation of the best of k
      responses drawn without replacement. For 0/1 rewards that is the unbiased estimate of Chen et
      al. (2021). If a reward is outside [0, 1], a response is right if its reward is positive.
    - best@k and worst@k as in verl, drawn with replacement (`resampled`).
    - maj@k of the same draws, if the reward function reports the parsed answers (`pred`).

    The interval is Wilson's with one trial per prompt. For N > 1 it is wider than necessary, never
    too narrow. It is omitted for accuracies outside [0, 1]. Raises DataError if prompts of one
    source have different numbers of responses.
    """
    metrics: dict[str, float] = {}
    for source in sorted({group.prompt.data_source for group in groups}):
        chosen = [group for group in groups if group.prompt.data_source == source]
        metrics |= _validation_of(source or "unknown", chosen, max_response_length)
    return metrics


def accuracy_interval(
    correct: Sequence[bool] | Sequence[float], *, z: float = Z_95
) -> tuple[float, float, float]:
    """Return (accuracy, low, high) with Wilson's score interval (1927), by default 95 %.

    `correct` has one entry in [0, 1] per independent trial. An entry may be a fraction, the mean
    over the responses to one prompt. Its variance is at most that of a 0/1 variable with the same
    mean, so the interval still covers. Raises DataError without trials or outside [0, 1].
    """
    values = [float(value) for value in correct]
    n = len(values)
    if n == 0:
        raise DataError("the accuracy of zero responses is undefined; evaluate one prompt or more")
    if min(values) < 0.0 or max(values) > 1.0:
        raise DataError(
            f"accuracies must be in [0, 1], got [{min(values)}, {max(values)}]; pass 0/1 values"
        )
    p = math.fsum(values) / n
    scale = 1.0 + z * z / n
    center = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 one bound equals p; min and max remove the rounding error.
    return p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of independent `values`, such as accuracies of several runs.

    The interval is Student's 95 % interval (1908), for more than 31 values the normal one. Raises
    DataError for fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise DataError(f"the interval of a mean needs two or more values, got {n}")
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = (_T_95[n - 2] if n - 2 < len(_T_95) else Z_95) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def paired_difference(
    a: Sequence[bool], b: Sequence[bool], *, resamples: int = 10_000, seed: int = 42
) -> tuple[float, float, float]:
    """Return (difference, low, high) of accuracy b minus a on the same prompts (95 % bootstrap).

    Prompts are resampled with replacement `resamples` times; the bounds are the 2.5 and 97.5
    percentiles. A pair differs by -1, 0 or 1, so one multinomial draw of their counts has the same
    distribution as drawing prompts one by one. Raises DataError for unequal or empty sequences.
    """
    if len(a) != len(b) or not a:
        raise DataError(
            f"a paired difference needs results for the same prompts, got {len(a)} and {len(b)}"
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
    shares = all(0.0 <= value <= 1.0 for row in rows for value in row)
    right = [[float(value > 0.0) for value in row] for row in rows]
    means = [math.fsum(row) / n for row in rows]
    core, aux = f"val-core/{source}/acc", f"val-aux/{source}"
    metrics = {f"{core}/mean@{n}": math.fsum(means) / len(means)}
    if all(0.0 <= mean <= 1.0 for mean in means):
        _, low, high = accuracy_interval(means)
        metrics[f"{aux}/acc/mean@{n}/ci_low"] = low
        metrics[f"{aux}/acc/mean@{n}/ci_high"] = high
    answers = [[_answer(sample) for sample in group.samples] for group in groups]
    has_answers = any(answer for row in answers for answer in row)
    for k in subset_sizes(n):
        best = [_best_of(row, k) for row in (rows if shares else right)]
        metrics[f"{aux}/acc/pass@{k}"] = math.fsum(best) / len(best)
        drawn = best_and_worst(rows, k) | (majority(rows, answers, k) if has_answers else {})
        for name, value in drawn.items():
            # verl puts the means for k = N into val-core, all other values into val-aux.
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
    """Return whether the sample failed, including failures scored 0 (`rewards.protocol`)."""
    return sample.status == Status.FAILED or "reward_failure" in sample.metadata


def _accuracy(sample: Sample) -> float:
    if sample.status == Status.FAILED:
        return 0.0
    return float(sample.reward_parts.get("acc", sample.reward))


def _answer(sample: Sample) -> str:
    """Return the answer that the reward function parsed; empty if it reported none."""
    return str(sample.metadata.get("pred", ""))


def _best_of(values: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of `values` drawn without replacement."""
    ordered = sorted(values)
    total = math.comb(len(ordered), k)
    # Entry i is the maximum in comb(i, k - 1) subsets: the other k - 1 values are below it.
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
    segments = [segment for branch in sample.branches for segment in branch.segments]
    roles = [segment.role for segment in segments if segment.ids]
    return sum(1 for i, role in enumerate(roles) if i == 0 or role != roles[i - 1])


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
