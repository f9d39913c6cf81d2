"""Batch statistics match numbers calculated by hand."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from slipstream.errors import DataError
from slipstream.metrics.batch_metrics import (
    accuracy_interval,
    episode_metrics,
    failures_by_reason,
    mean_interval,
    paired_difference,
    reason_name,
    rollout_metrics,
    summary,
    validation_metrics,
)
from slipstream.metrics.names import check_names
from slipstream.metrics.resampled import best_and_worst, majority
from slipstream.types import EpisodeRecord, Group, Prompt, Sample, Segment, Status


def sample(
    length: int, reward: float, status: Status = Status.COMPLETED, prompt: int = 3
) -> Sample:
    return Sample(
        segments=[Segment.given("prompt", [0] * prompt), Segment.given("assistant", [1] * length)],
        reward=reward,
        status=status,
    )


def group(index: int, *samples: Sample, source: str = "countdown") -> Group:
    prompt = Prompt(uid=str(index), ids=[0], data_source=source)
    return Group(index=index, prompt=prompt, samples=list(samples))


def test_rollout_metrics_match_hand_calculated_values() -> None:
    groups = [
        group(0, sample(2, 1.0), sample(4, 0.0), sample(12, 0.5, Status.TRUNCATED)),
        group(1, sample(6, 1.0, prompt=5), sample(6, 1.0, Status.ABORTED, prompt=5)),
        group(2, sample(0, 7.0, Status.FAILED), sample(0, 1.0)),
    ]
    metrics = rollout_metrics(groups, max_prompt_length=5, max_response_length=12)
    check_names(metrics)
    assert metrics == {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": pytest.approx(30 / 7),
        "response_length/max": 12.0,
        "response_length/min": 0.0,
        "response_length/median": 4.0,
        "response_length/p90": pytest.approx(8.4),
        "response_length/clip_ratio": pytest.approx(1 / 7),
        "response/aborted_ratio": pytest.approx(1 / 7),
        "prompt_length/mean": pytest.approx(25 / 7),
        "prompt_length/max": 5.0,
        "prompt_length/min": 3.0,
        "prompt_length/clip_ratio": pytest.approx(2 / 7),
        "num_turns/mean": pytest.approx(12 / 7),
        "num_turns/max": 2.0,
        "num_turns/min": 1.0,
        "rollout/num_prompts": 3.0,
        "rollout/num_samples": 7.0,
        "rollout/longest_over_median": 2.0,
        "training/num_zero_variance_groups": 1.0,
        "training/num_failed_rewards": 1.0,
        "training/num_failed_rewards/no_reason_given": 1.0,
        "perf/total_num_tokens": 55.0,
    }


def test_failed_samples_have_no_score_and_no_samples_raise() -> None:
    metrics = rollout_metrics(
        [group(0, sample(1, 0.0, Status.FAILED))], max_prompt_length=9, max_response_length=9
    )
    assert "critic/score/mean" not in metrics
    assert metrics["training/num_failed_rewards"] == 1.0
    with pytest.raises(DataError, match="no sample in 1 group"):
        rollout_metrics([group(0)], max_prompt_length=9, max_response_length=9)


def test_reward_parts_and_zero_scored_failures_are_counted() -> None:
    first, second = sample(1, 1.0), sample(1, 0.0)
    first.reward_parts = {"format": 1.0, "score": 1.0}
    second.reward_parts = {"score": 0.0}
    second.metadata["reward_failure"] = "timed out"
    metrics = rollout_metrics([group(0, first, second)], max_prompt_length=9, max_response_length=9)
    assert {k: v for k, v in metrics.items() if k.startswith("reward/")} == {
        "reward/format/mean": 1.0, "reward/format/max": 1.0, "reward/format/min": 1.0,
    }  # fmt: skip
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["training/num_failed_rewards"] == 1.0


def test_consecutive_segments_of_one_role_are_one_turn() -> None:
    many = sample(2, 0.0)
    for role in ("assistant", "tool", "tool", "assistant"):
        many.append(Segment.given(role, [1]))
    metrics = rollout_metrics([group(0, many)], max_prompt_length=9, max_response_length=9)
    assert metrics["num_turns/max"] == 4.0


def test_episodes_are_counted() -> None:
    first, second = sample(4, 1.0), sample(2, 0.0)
    first.episode = EpisodeRecord(turns=3, calls=2, problems={"raised": 1}, tool_seconds=0.5)
    second.episode = EpisodeRecord(
        turns=1, truncated_by="tokens", problems={"raised": 2}, metrics={"found": 1.0}
    )
    metrics = episode_metrics([first, second, sample(1, 0.0)])
    check_names(metrics)
    assert metrics == {
        "episode/turns/mean": 2.0,
        "episode/turns/max": 3.0,
        "episode/turns/min": 1.0,
        "episode/branches/mean": 1.0,
        "episode/branches/max": 1.0,
        "episode/branches/min": 1.0,
        "tool_call_counts/mean": 1.0,
        "tool_call_counts/max": 2.0,
        "tool_call_counts/min": 0.0,
        "episode/tool_seconds/mean": 0.25,
        "episode/tool_seconds/max": 0.5,
        "episode/tool_seconds/min": 0.0,
        "episode/problems/raised": 3.0,
        "episode/truncated/tokens": 1.0,
        "episode/found": 1.0,
    }
    assert episode_metrics([sample(1, 0.0)]) == {}


def test_summary_of_no_values_is_empty() -> None:
    assert summary("x", []) == {}
    assert summary("x", [1, 3]) == {"x/mean": 2.0, "x/max": 3.0, "x/min": 1.0}


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 20, 0.0, 0.1611),
        (20, 20, 0.8389, 1.0),
        (263, 400, 0.6097, 0.7024),
    ],
)
def test_accuracy_interval_is_wilsons(right: int, n: int, low: float, high: float) -> None:
    p, found_low, found_high = accuracy_interval([True] * right + [False] * (n - right))
    assert p == right / n
    assert found_low == pytest.approx(low, abs=1e-4)
    assert found_high == pytest.approx(high, abs=1e-4)
    assert 0.0 <= found_low <= p <= found_high <= 1.0


def test_accuracy_interval_refuses_empty_and_out_of_range_input() -> None:
    with pytest.raises(DataError, match="evaluate"):
        accuracy_interval([])
    with pytest.raises(DataError, match=r"got \[-1.0, 1.0\]"):
        accuracy_interval([-1.0, 1.0])


def test_paired_difference_and_its_interval() -> None:
    a = [True] * 40 + [False] * 60
    b = [True] * 30 + [False] * 10 + [True] * 30 + [False] * 30
    difference, low, high = paired_difference(a, b)
    assert difference == 0.2
    # Normal approximation: sqrt((0.4 - 0.04) / 100) = 0.06 either way, times 1.96.
    assert low == pytest.approx(0.2 - 0.1176, abs=0.011)
    assert high == pytest.approx(0.2 + 0.1176, abs=0.011)
    assert paired_difference(a, b) == (difference, low, high)
    assert paired_difference(b, a)[0] == -0.2
    assert paired_difference(a, a) == (0.0, 0.0, 0.0)
    with pytest.raises(DataError, match="got 2 and 1"):
        paired_difference([True, False], [True])


def test_paired_difference_matches_resampling_prompts_one_by_one() -> None:
    a = [i % 3 == 0 for i in range(60)]
    b = [i % 2 == 0 for i in range(60)]
    rng = random.Random(0)
    pairs = list(zip(a, b, strict=True))
    draws = sorted(
        sum(int(y) - int(x) for x, y in rng.choices(pairs, k=60)) / 60 for _ in range(4000)
    )
    _, low, high = paired_difference(a, b)
    assert low == pytest.approx(draws[100], abs=0.02)
    assert high == pytest.approx(draws[3900], abs=0.02)


def test_validation_metrics_with_one_response_per_prompt() -> None:
    groups = [group(i, sample(i, float(i < 8))) for i in range(10)]
    groups += [group(9, sample(4, 1.0, Status.FAILED), source="other/set")]
    metrics = validation_metrics(groups, max_response_length=9)
    check_names(metrics)
    assert metrics == {
        "val-core/countdown/acc/mean@1": 0.8,
        "val-aux/countdown/acc/mean@1/ci_low": pytest.approx(0.4902, abs=1e-4),
        "val-aux/countdown/acc/mean@1/ci_high": pytest.approx(0.9433, abs=1e-4),
        "val-aux/countdown/num_prompts": 10.0,
        "val-aux/countdown/num_failed": 0.0,
        "val-aux/countdown/response_length/mean": 4.5,
        "val-aux/countdown/response_length/max": 9.0,
        "val-aux/countdown/response_length/clip_ratio": 0.1,
        "val-core/other/set/acc/mean@1": 0.0,
        "val-aux/other/set/acc/mean@1/ci_low": 0.0,
        "val-aux/other/set/acc/mean@1/ci_high": pytest.approx(0.7935, abs=1e-4),
        "val-aux/other/set/num_prompts": 1.0,
        "val-aux/other/set/num_failed": 1.0,
        "val-aux/other/set/response_length/mean": 4.0,
        "val-aux/other/set/response_length/max": 4.0,
        "val-aux/other/set/response_length/clip_ratio": 0.0,
    }


def test_pass_at_k_of_rewards_below_0_counts_right_responses() -> None:
    rewards = [[-1.0, -1.0, -1.0, 1.0], [-1.0] * 4]
    metrics = validation_metrics(
        [group(i, *(sample(1, r) for r in row)) for i, row in enumerate(rewards)]
    )
    assert metrics["val-aux/countdown/acc/pass@2"] == pytest.approx((3 / 6 + 0) / 2)
    assert metrics["val-aux/countdown/acc/pass@4"] == pytest.approx(1 / 2)
    assert metrics["val-core/countdown/acc/mean@4"] == pytest.approx(-6 / 8)


def test_pass_at_k_is_the_mean_of_best_over_all_subsets() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5, [1.0, 1.0, 0.0, 1.0, 0.0]]
    groups = [group(i, *(sample(1, r) for r in row)) for i, row in enumerate(rewards)]
    metrics = validation_metrics(groups)
    check_names(metrics)
    for k in (2, 4, 5):
        subsets = [
            sum(max(c) for c in itertools.combinations(row, k))
            / len([*itertools.combinations(row, k)])
            for row in rewards
        ]
        assert metrics[f"val-aux/countdown/acc/pass@{k}"] == pytest.approx(sum(subsets) / 3)
    assert metrics["val-aux/countdown/acc/pass@5"] == pytest.approx(2 / 3)
    assert metrics["val-core/countdown/acc/mean@5"] == pytest.approx(4 / 15)
    deviations = [statistics.pstdev(row) for row in rewards]
    assert metrics["val-aux/countdown/acc/std@5"] == pytest.approx(sum(deviations) / 3)
    # verl's metrics draw with replacement.
    resampled = {k: best_and_worst(rewards, k) for k in (2, 4, 5)}
    assert metrics["val-core/countdown/acc/best@5/mean"] == resampled[5]["best@5/mean"]
    assert metrics["val-aux/countdown/acc/best@5/std"] == resampled[5]["best@5/std"]
    assert metrics["val-aux/countdown/acc/worst@4/mean"] == resampled[4]["worst@4/mean"]
    assert "val-aux/countdown/acc/best@5/mean" not in metrics
    assert not any("maj@" in name for name in metrics)


def test_validation_metrics_have_majority_of_parsed_answers() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5]
    answers = [["7", "8", "9", "7", ""], ["1", "2", "1", "1", "3"]]
    groups = [group(i, *(sample(1, r) for r in row)) for i, row in enumerate(rewards)]
    for one, row in zip(groups, answers, strict=True):
        for member, answer in zip(one.samples, row, strict=True):
            if answer:
                member.metadata["pred"] = answer
    metrics = validation_metrics(groups)
    check_names(metrics)
    expected = majority(rewards, answers, 5)
    assert metrics["val-core/countdown/acc/maj@5/mean"] == expected["maj@5/mean"]
    assert metrics["val-aux/countdown/acc/maj@5/std"] == expected["maj@5/std"]
    assert (
        metrics["val-aux/countdown/acc/maj@2/mean"] == majority(rewards, answers, 2)["maj@2/mean"]
    )


def test_accuracy_uses_part_acc_and_has_no_interval_outside_0_to_1() -> None:
    shaped = sample(1, -0.5)
    shaped.reward_parts = {"acc": 1.0}
    assert validation_metrics([group(0, shaped)])["val-core/countdown/acc/mean@1"] == 1.0
    metrics = validation_metrics([group(0, sample(1, -0.5))])
    assert metrics["val-core/countdown/acc/mean@1"] == -0.5
    assert not any("ci_" in name for name in metrics)


def test_unequal_numbers_of_responses_are_refused() -> None:
    with pytest.raises(DataError, match=r"same number of responses .* got \[1, 2\]"):
        validation_metrics([group(0, sample(1, 1.0)), group(1, sample(1, 1.0), sample(1, 0.0))])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("no answer within 30 s", "no_answer_within_s"),
        ("ValueError: x is -3.5", "valueerror"),
        ("engine embedded: RuntimeError: out of memory", "engine_embedded"),
        ("one two three four five six seven", "one_two_three_four_five_six"),
        ("", "no_reason_given"),
        ("404", "no_reason_given"),
    ],
)
def test_reason_name(text: str, name: str) -> None:
    assert reason_name(text) == name
    check_names({f"training/num_failed_rewards/{name}": 1.0})


def test_failures_are_counted_by_reason_and_rare_ones_as_other() -> None:
    def failed(text: str) -> Sample:
        return Sample(status=Status.FAILED, failure=text)

    scored = Sample(status=Status.COMPLETED, metadata={"reward_failure": "ValueError: 3"})
    samples = [failed("ValueError: 1"), failed("ValueError: 2"), failed("late"), scored, Sample()]
    assert failures_by_reason(samples) == {"valueerror": 3, "late": 1}
    letters = [failed(letter * 3) for letter in "abcdefghij"] + [failed("aaa")]
    found = failures_by_reason(letters)
    assert (found["aaa"], found["other"], found.total()) == (2, 2, 11)


def test_mean_interval_is_students() -> None:
    # Fisher, Statistical Methods for Research Workers, section 24: ten patients' hours of sleep.
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    mean, low, high = mean_interval(hours)
    assert mean == pytest.approx(1.58)
    assert (high - low) / 2 == pytest.approx(2.262 * 0.3890, rel=1e-3)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)
    # For many values the interval is that of the normal distribution.
    _, low, high = mean_interval([0.0, 1.0] * 100)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 200**0.5, rel=0.01)


def test_mean_interval_needs_two_values() -> None:
    with pytest.raises(DataError, match="two or more values"):
        mean_interval([0.5])


def test_lengths_and_tokens_of_an_episode_cover_all_branches() -> None:
    branched = sample(2, 1.0, prompt=7)
    branched.earlier = [sample(5, 0.0)]
    metrics = rollout_metrics([group(0, branched)], max_prompt_length=9, max_response_length=9)
    assert metrics["response_length/mean"] == 5 + 2
    assert metrics["prompt_length/mean"] == 3
    assert metrics["perf/total_num_tokens"] == (3 + 5) + (7 + 2)
    # The prompt and a turn in each branch; a rendered context counts as one, too.
    assert metrics["num_turns/mean"] == 4
