"""A run's own policy, decoded plainly and with drafts, in turns: the same responses, sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.inference.protocol import EngineStats, InferenceEngine
from slipstream.loops.evaluate import EvalSettings
from slipstream.loops.evaluate import evaluate as run_evaluation
from slipstream.rewards.protocol import RewardManager
from slipstream.types import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Seconds are those of engine steps, medians over `rounds`; `identical` compares token ids and
    log-probs of every round, bit for bit."""

    tokens: int
    plain_seconds: float
    speculative_seconds: float
    identical: bool
    accept_length: float
    rounds: int

    @property
    def speedup(self) -> float:
        """Of speculation over plain decoding."""
        return self.plain_seconds / self.speculative_seconds


async def side_by_side(
    plain: InferenceEngine,
    speculative: InferenceEngine,
    prompts: Sequence[Prompt],
    rewards: RewardManager,
    settings: EvalSettings,
    *,
    rounds: int = 9,
    warm_up: int = 3,
) -> SideBySide:
    """Answer `prompts` with each engine in turns, after some rounds to warm up: in a run, too, the
    selector has measured its plans over many steps."""
    engines = {"plain": plain, "speculative": speculative}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens, identical = 0, True
    before = speculative.stats()
    for number in range(warm_up + rounds):
        if number == warm_up:
            before = speculative.stats()
        written: list[list[tuple[list[int], list[float]]]] = []
        for name, engine in engines.items():
            start = _compute_seconds(engine.stats())
            evaluation = await run_evaluation([engine], prompts, rewards, settings)
            if number >= warm_up:
                seconds[name].append(_compute_seconds(engine.stats()) - start)
            samples = [sample for group in evaluation.groups for sample in group.samples]
            written.append([_bits(sample) for sample in samples])
            tokens = sum(sample.response_length for sample in samples)
        identical = identical and written[0] == written[1]
    return SideBySide(
        tokens=tokens,
        plain_seconds=median(seconds["plain"]),
        speculative_seconds=median(seconds["speculative"]),
        identical=identical,
        accept_length=speculative.stats().since(before).accept_length,
        rounds=rounds,
    )


def _compute_seconds(stats: EngineStats) -> float:
    return stats.prefill_seconds + stats.decode_seconds


def _bits(sample: Sample) -> tuple[list[int], list[float]]:
    return list(sample.tokens), list(sample.rollout_log_probs)
