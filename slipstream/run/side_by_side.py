"""Compares decoding with and without drafts on a run's policy, interleaved.

One engine does both, so both use the same memory. Two engines with the same work can differ by
several percent, because their tensors have different addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.protocol import EngineStats
from slipstream.loops.evaluate import EvalSettings
from slipstream.loops.evaluate import evaluate as run_evaluation
from slipstream.rewards.protocol import RewardManager
from slipstream.types import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The result of the comparison.

    Seconds are the time of engine steps, medians over `rounds`. `speedup` is the median over rounds
    of plain time / time with drafts; half of the rounds are between `speedup_low` and
    `speedup_high`. `noise_low` and `noise_high` are the same quartiles for plain decoding against
    itself. `identical`: token ids and log-probs are equal bit for bit in every round. `at_once`
    responses run at a time. `on_fraction` is the share of the decoding time with drafts;
    `accept_length`, the mean accepted length, is 1 without drafts.
    """

    responses: int
    at_once: int
    tokens: int
    plain_seconds: float
    speculative_seconds: float
    speedup: float
    speedup_low: float
    speedup_high: float
    noise_low: float
    noise_high: float
    identical: bool
    accept_length: float
    on_fraction: float
    rounds: int


async def side_by_side(
    engine: EmbeddedEngine,
    prompts: Sequence[Prompt],
    rewards: RewardManager,
    settings: EvalSettings,
    *,
    at_once: int,
    rounds: int = 15,
    warm_up: int = 4,
) -> SideBySide:
    """Respond to `prompts`, `at_once` at a time: without drafts, again without drafts, and with
    drafts, interleaved. The order changes from round to round.

    Warm-up rounds come first, so that the selector has measured its plans, as it has in a run. The
    difference between the two plain measurements is the noise.
    """
    groups = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
    names = ("plain", "again", "speculative")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    tokens, identical = 0, True
    drafted: list[EngineStats] = []
    for number in range(warm_up + rounds):
        written: list[list[tuple[list[int], list[float]]]] = []
        first = number % len(names)
        for name in names[first:] + names[:first]:
            await engine.speculate(name == "speculative")
            before = engine.stats()
            evaluations = [await run_evaluation([engine], g, rewards, settings) for g in groups]
            done = engine.stats().since(before)
            if number >= warm_up:
                seconds[name].append(done.prefill_seconds + done.decode_seconds)
                drafted += [done] if name == "speculative" else []
            samples = [s for e in evaluations for group in e.groups for s in group.samples]
            written.append([_bits(sample) for sample in samples])
            tokens = sum(sample.response_length for sample in samples)
        identical = identical and written[0] == written[1] == written[2]
    await engine.speculate(True)
    low, middle, high = _quartiles(seconds["plain"], seconds["speculative"])
    in_all = EngineStats(
        accepted_tokens=sum(stats.accepted_tokens for stats in drafted),
        verifications=sum(stats.verifications for stats in drafted),
        draft_seconds=sum(stats.draft_seconds for stats in drafted),
        decode_seconds=sum(stats.decode_seconds for stats in drafted),
    )
    noise_low, _, noise_high = _quartiles(seconds["plain"], seconds["again"])
    return SideBySide(
        responses=len(prompts),
        at_once=at_once,
        tokens=tokens,
        plain_seconds=median(seconds["plain"]),
        speculative_seconds=median(seconds["speculative"]),
        speedup=middle,
        speedup_low=low,
        speedup_high=high,
        noise_low=noise_low,
        noise_high=noise_high,
        identical=identical,
        accept_length=in_all.accept_length,
        on_fraction=in_all.on_fraction,
        rounds=rounds,
    )


def _quartiles(plain: Sequence[float], other: Sequence[float]) -> list[float]:
    """The quartiles of plain time / other time over the rounds."""
    return quantiles([p / s for p, s in zip(plain, other, strict=True)], method="inclusive")


def _bits(sample: Sample) -> tuple[list[int], list[float]]:
    return list(sample.tokens), list(sample.rollout_log_probs)
