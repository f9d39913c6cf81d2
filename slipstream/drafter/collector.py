"""What the trainer's forward pass computes anyway, kept for the draft head.

A `FeatureSink`: rows are chosen before the forward pass, and their final hidden states come with
the tokens they belong to. Works on the trainer's compute thread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.buffer import DraftBuffer, Kept, from_tree, to_tree
from slipstream.drafter.sequences import DraftSequence
from slipstream.errors import ConfigError
from slipstream.types import Features, NoiseKey, SamplingParams, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """Which rows are kept, and how much of them.

    `held_out` is how many responses are kept to measure acceptance on: one in `held_out_every`,
    never trained on, the newest ones. `params` is how responses are sampled. What follows after
    `max_length` tokens is left out. Raises ConfigError for counts below 1.
    """

    params: SamplingParams
    max_length: int
    held_out: int
    held_out_every: int

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("held_out", 1), ("held_out_every", 2)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"collector of the draft head: {name}={getattr(self, name)} must be at least "
                    f"{least}"
                )


def rows_to_keep(batch: TrainBatch, settings: CollectorSettings) -> set[int]:
    """The rows with something to draft whose noise is known."""
    return {
        index
        for index, row in enumerate(batch.rows)
        if row.key is not None and any(row.loss_mask[2 : settings.max_length])
    }


def kept_of(features: Features, step: int, settings: CollectorSettings) -> Kept:
    """What stays of the features of such a row."""
    assert features.key is not None, "one of `rows_to_keep`"
    length, hidden = settings.max_length, features.hidden
    if len(hidden) > length:
        # A part of them would keep the memory of the whole.
        hidden = hidden[:length].clone()
    return Kept(
        sequence=DraftSequence(
            tokens=features.tokens[:length],
            features_TD=hidden,
            loss_mask=features.loss_mask[:length],
        ),
        key=features.key,
        step=step,
    )


class FeatureForwarder:
    """`FeatureSink` for who trains elsewhere: the rows of a step, to be taken away."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._step = 0
        self._kept: list[Kept] = []

    def begin_step(self, step: int) -> None:
        """RL step `step` is about to be trained on."""
        self._step = step

    def select(self, batch: TrainBatch) -> set[int]:
        """See `FeatureSink`."""
        return rows_to_keep(batch, self._settings)

    def receive(self, features: Features) -> None:
        """See `FeatureSink`."""
        self._kept.append(kept_of(features, self._step, self._settings))

    def take(self) -> list[Kept]:
        """What has come since the last call."""
        taken, self._kept = self._kept, []
        return taken


class FeatureCollector:
    """`FeatureSink` into a buffer, and beside it into a few responses that are only measured on."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, buffer: DraftBuffer, settings: CollectorSettings) -> None:
        self.buffer = buffer
        self.settings = settings
        self._step: int | None = None
        self._held_out: deque[Kept] = deque(maxlen=settings.held_out)

    @property
    def held_out(self) -> list[HeldOut]:
        """The newest responses that are not trained on."""
        params = self.settings.params
        return [HeldOut(sequence=k.sequence, key=k.key, params=params) for k in self._held_out]

    def begin_step(self, step: int, *, wanted: bool) -> None:
        """RL step `step` is about to be trained on; its rows are kept where that is `wanted`."""
        self._step = step if wanted else None
        self.buffer.forget_before(step)

    def select(self, batch: TrainBatch) -> set[int]:
        """See `FeatureSink`."""
        return set() if self._step is None else rows_to_keep(batch, self.settings)

    def receive(self, features: Features) -> None:
        """See `FeatureSink`."""
        assert self._step is not None, "selected"
        self.keep(kept_of(features, self._step, self.settings))

    def keep(self, kept: Kept) -> None:
        """Take a response in: to train on, or to measure on."""
        if self._is_held_out(kept.key):
            self._held_out.append(kept)
        else:
            self.buffer.add(kept)

    def state_dict(self) -> dict[str, Any]:
        """Buffer and held-out responses, as a tree with tensors."""
        return {
            "buffer": self.buffer.state_dict(),
            "held_out": [to_tree(kept) for kept in self._held_out],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.buffer.load_state_dict(state["buffer"])
        self._held_out.clear()
        self._held_out.extend(from_tree(tree) for tree in state["held_out"])

    def _is_held_out(self, key: NoiseKey) -> bool:
        """By all samples of a prompt at once: siblings are alike."""
        name = f"{key.seed}/{key.epoch}/{key.uid}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
        return number % self.settings.held_out_every == 0
