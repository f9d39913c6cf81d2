"""The training loop of a draft head: get a round of responses, train on it, repeat.

The loop is pure: `run.draft_phase` calls it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.deadlines import REMEDY, Deadlines
from slipstream.drafter.sequences import DraftSequence, VocabLayers, passes
from slipstream.drafter.trainer import DraftTrainer, Metrics
from slipstream.errors import check_at_least_one
from slipstream.loops.draft_data import SequenceSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoopSettings:
    """Sizes of the loop: `total_steps` steps of `batch_size` sequences each, with new sequences
    every `steps_per_round` steps. `seed` sets the order of the sequences of a round.
    `steps_per_pass` is the number of steps of a pass over them.

    Raises ConfigError for counts below 1.
    """

    total_steps: int
    steps_per_round: int
    batch_size: int
    seed: int
    steps_per_pass: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "total_steps", "steps_per_round", "batch_size", where="draft: ")


def train_draft_head(
    trainer: DraftTrainer,
    source: SequenceSource,
    vocab: VocabLayers,
    settings: DraftLoopSettings,
    *,
    deadlines: Deadlines | None = None,
    stop: Callable[[], bool] = lambda: False,
    after_step: Callable[[int, Metrics], None] | None = None,
    after_round: Callable[[Mapping[str, Any], bool], None] | None = None,
    enough: Callable[[], bool] = lambda: False,
    before_training: Callable[[Sequence[DraftSequence]], None] | None = None,
) -> bool:
    """Train until `total_steps`, or until `enough` is true after a round. Returns False if `stop`
    ended the training earlier.

    Continues at the trainer's step. `source` must be at its position before the round of that step.
    `after_round` gets the position of `source` to resume from, and whether the loop ends. If a
    round was stopped half-way, that is the position before the round: a resumed training creates
    the round again and skips the steps that were done. `before_training` gets the sequences of the
    first round, before the first step. Blocks the caller's thread. `deadlines`
    limits the time of both halves of a round.
    """
    deadlines = deadlines or Deadlines()
    while trainer.step < settings.total_steps:
        number, done = divmod(trainer.step, settings.steps_per_round)
        position = source.state_dict()
        with deadlines.last_resort(_late("responses to train on"), deadlines.timeout_s):
            sequences = source.next_round(stop)
        if sequences is None:
            if after_round is not None:
                after_round(position, True)
            return False
        if trainer.step == 0 and before_training is not None:
            before_training(sequences)
        batches = passes(sequences, settings.batch_size, f"draft/{settings.seed}/{number}")
        end = min((number + 1) * settings.steps_per_round, settings.total_steps)
        with deadlines.last_resort(_late("training on them"), deadlines.timeout_s):
            trainer.train(
                itertools.islice(batches, done, None),
                vocab,
                steps=end - trainer.step,
                stop=stop,
                after_step=after_step,
            )
        stopped = trainer.step < end
        last = stopped or end == settings.total_steps or enough()
        if after_round is not None:
            after_round(position if stopped else source.state_dict(), last)
        if last:
            return not stopped
    return True


def _late(what: str) -> str:
    return f"draft: {what}: a round exceeded trainer.stage_timeout_s; {REMEDY}"
