"""The console output of a run: which steps are printed, and their format."""

from __future__ import annotations

import io
import itertools

import pytest

from slipstream.metrics.progress import Progress, SteadyConsole
from slipstream.run.console import (
    StepLines,
    accuracies,
    duration,
    headlines,
    sample_texts,
    short,
    shown_samples,
)
from slipstream.types import EpisodeRecord, Group, PlacedReward, Prompt, Sample, Segment


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(total: int, seconds_per_step: float, *, show: bool = True) -> list[str]:
    out, clock = io.StringIO(), Clock()
    progress = Progress(console=SteadyConsole(file=out, width=200), plain=True, clock=clock)
    with progress:
        progress.phase("RL", total, lines=not show)
        log = StepLines(progress, "RL", total, lines=show, clock=clock)
        log.log(0, {"val-core/x/acc/mean@1": 0.5})
        for step in range(1, total + 1):
            clock.now += seconds_per_step
            log.log(step, {"timing_s/step": 1.0, "critic/score/mean": step / 8, "perf/x": 3.0})
    return out.getvalue().splitlines()


def test_short_phase_prints_one_line_per_step() -> None:
    assert lines(4, 2.0) == [
        "RL: 4 steps",
        "RL 1/4     reward 0.125",
        "RL 2/4     reward 0.25    4s left",
        "RL 3/4     reward 0.375   2s left",
        "RL 4/4     reward 0.5",
    ]


@pytest.mark.parametrize(
    ("total", "seconds", "steps"),
    [
        (500, 0.1, [1, *range(20, 501, 20)]),
        # Printing every fourth step would leave 24 seconds without output.
        (100, 6.0, [1, *range(3, 100, 2), 100]),
        (100, 30.0, [*range(1, 101)]),
    ],
)
def test_long_phase_skips_steps_but_prints_regularly(
    total: int, seconds: float, steps: list[int]
) -> None:
    shown = [int(line.split()[1].partition("/")[0]) for line in lines(total, seconds)[1:]]
    if seconds < 6:
        assert shown == steps
    assert shown[0] == 1
    assert shown[-1] == total
    longest = max(b - a for a, b in itertools.pairwise(shown))
    assert longest == max(b - a for a, b in itertools.pairwise(steps))


def test_progress_prints_lines_without_the_console_logger() -> None:
    shown = lines(3, 20.0, show=False)
    assert shown[0] == "RL: 3 steps"
    assert len(shown) == 4


def test_headlines_start_with_the_reward() -> None:
    metrics = {
        "actor/entropy": 1.0,
        "rollout/tokens_per_second": 2.0,
        "response_length/mean": 3.0,
        "critic/score/mean": 4.0,
        "critic/score/max": 5.0,
        "timing_s/step": 6.0,
    }
    assert list(headlines(metrics)) == ["reward", "length", "entropy", "tok/s"]


def test_accuracy_line_has_interval_and_number_of_problems() -> None:
    metrics = {
        "val-core/openai/gsm8k/acc/mean@4": 0.5,
        "val-aux/openai/gsm8k/acc/mean@4/ci_low": 0.25,
        "val-aux/openai/gsm8k/acc/mean@4/ci_high": 0.75,
        "val-aux/openai/gsm8k/num_prompts": 32.0,
        "val-core/openai/gsm8k/acc/best@4/mean": 0.9,
        "val-core/other/acc/mean@1": 3.0,
    }
    assert accuracies(metrics) == [
        "accuracy 0.500 (95 %: 0.250 to 0.750) on 32 held-out problems, openai/gsm8k",
        "mean reward 3.000, other",
    ]


def group(index: int, response: str) -> Group:
    prompt = Prompt(
        uid=str(index), ids=[1], messages=[{"role": "user", "content": f"ask\n{index}"}]
    )
    sample = Sample.from_prompt(prompt, group_index=index, index=0)
    sample.response, sample.reward = response, 0.5
    return Group(index=index, prompt=prompt, samples=[sample])


def test_sample_texts_are_single_lines_with_start_and_end() -> None:
    groups = [group(i, "one\n two" if i else "x" * 90 + " answer 7") for i in range(6)]
    assert sample_texts(shown_samples(groups, 3), str) == [
        f"    0.5 | ask 0 => {'x' * 36} ... {'x' * 27} answer 7",
        "    0.5 | ask 2 => one two",
        "    0.5 | ask 4 => one two",
    ]
    assert shown_samples(groups, 0) == []
    assert len(shown_samples(groups, 99)) == 6


def test_episodes_have_a_line_for_each_turn_and_answer() -> None:
    (shown,) = shown_samples([group(0, "unused")], 1)
    sample = shown[1]
    for role, ids in (("assistant", [5, 6]), ("tool", [7]), ("assistant", [8])):
        sample.append(Segment.given(role, ids))
    sample.episode = EpisodeRecord(turns=2, rewards=[PlacedReward(2, "look_up", -0.03)])
    assert sample_texts([shown], str) == [
        "    0.5 | ask 0",
        "        | policy  [5, 6]  [look_up -0.03]",
        "        | tool    [7]",
        "        | policy  [8]",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (12.0, "12"), (99.96, "100"), (4321.9, "4322"), (float("nan"), "nan")],
)
def test_short_formats_numbers(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4s"), (75.0, "1m15s"), (3599.7, "1h00m"), (7300.0, "2h01m")]
)
def test_duration_formats_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text
