"""Rows of an RL step with their features, kept for the draft head.

A `FeatureSink`: rows are chosen before the trainer's forward pass, which computes the features
anyway, and their hidden states come with the tokens they belong to; those that an engine has
handed over while it decoded (`decoded`) are not asked for again. Works on the trainer's compute
thread.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.buffer import BufferedSequence, DraftBuffer, from_tree, to_tree
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.sequences import DraftSequence
from slipstream.errors import ConfigError
from slipstream.training.columns import rows_of_column
from slipstream.types import Features, NoiseKey, PolicyVersion, SamplingParams, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """Which rows are kept, and how much of them.

    `held_out` is how many responses are kept to measure acceptance on: one in `held_out_every`,
    never trained on, the newest ones. `params` is how responses are sampled. What follows after
    `max_length` tokens is left out. `aux_layers` are the head's (`DraftModel`). Raises ConfigError
    for counts below 1.
    """

    params: SamplingParams
    max_length: int
    held_out: int
    held_out_every: int
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("held_out", 1), ("held_out_every", 2)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"collector of the draft head: {name}={getattr(self, name)} must be at least "
                    f"{least}"
                )


class RowCollector:
    """`FeatureSink` that makes `BufferedSequence` of the rows of a step, whoever computed their
    features.

    Features are those of all tokens but the last, which nothing is predicted from: an engine that
    stops there does not compute them.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        keep: Callable[[BufferedSequence], None],
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """Every row goes to `keep`; `decoded` has what came from an engine."""
        self.tap_layers = settings.aux_layers
        self._settings = settings
        self._keep = keep
        self._decoded = decoded
        self._wanted, self._step, self._version = False, 0, 0

    def begin_step(self, step: int, version: PolicyVersion, *, wanted: bool = True) -> None:
        """RL step `step` is about to be trained on, whose responses were written under policy
        `version` at the latest; its rows are kept where that is `wanted`."""
        self._wanted, self._step, self._version = wanted, step, version

    def select(self, batch: TrainBatch) -> set[int]:
        """See `FeatureSink`: the rows with something to draft whose noise is known. Those that the
        engine has handed over are kept here and now."""
        if not self._wanted:
            return set()
        wanted = {
            index
            for index, (key, mask) in enumerate(
                zip(batch.keys, rows_of_column(batch.loss_mask, batch.starts), strict=True)
            )
            if key is not None and bool(mask[2 : self._settings.max_length].any())
        }
        if self._decoded is None:
            return wanted
        for index in sorted(wanted):
            key, place = batch.keys[index], batch.slice_of(index)
            tokens = batch.tokens[place].tolist()
            hidden = self._decoded.take(key, tokens)
            if hidden is not None:
                wanted.remove(index)
                self._add(tokens, batch.loss_mask[place].tolist(), hidden, key)
        return wanted

    def receive(self, features: Features) -> None:
        """See `FeatureSink`."""
        hidden = features.hidden
        if features.aux_layers is not None:
            hidden = torch.cat([features.aux_layers, hidden], -1)
        self._add(features.tokens, features.loss_mask, hidden, features.key)

    def _add(
        self, tokens: list[int], loss_mask: list[float], hidden: Tensor, key: NoiseKey | None
    ) -> None:
        assert key is not None, "selected"
        length = self._settings.max_length
        rows = min(len(tokens) - 1, length)
        if len(hidden) > rows:
            # A part of them would keep the memory of the whole.
            hidden = hidden[:rows].clone()
        self._keep(
            BufferedSequence(
                sequence=DraftSequence(
                    tokens=tokens[:length], features_TF=hidden, loss_mask=loss_mask[:length]
                ),
                key=key,
                step=self._step,
                version=self._version,
            )
        )


class FeatureForwarder(RowCollector):
    """For who trains elsewhere: the rows of a step, to be taken away."""

    def __init__(self, settings: CollectorSettings, decoded: DecodedFeatures | None = None) -> None:
        self._kept: list[BufferedSequence] = []
        super().__init__(settings, lambda kept: self._kept.append(kept), decoded)

    def take(self) -> list[BufferedSequence]:
        """What has come since the last call."""
        taken, self._kept = self._kept, []
        return taken


class FeatureCollector(RowCollector):
    """Into a buffer, and beside it into a few responses that are only measured on."""

    def __init__(
        self,
        buffer: DraftBuffer,
        settings: CollectorSettings,
        decoded: DecodedFeatures | None = None,
    ) -> None:
        super().__init__(settings, self.keep, decoded)
        self.buffer = buffer
        self.settings = settings
        self._held_out: list[BufferedSequence] = []

    @property
    def held_out(self) -> list[HeldOut]:
        """The newest responses that are not trained on."""
        params = self.settings.params
        return [HeldOut(sequence=k.sequence, key=k.key, params=params) for k in self._held_out]

    def begin_step(self, step: int, version: PolicyVersion, *, wanted: bool = True) -> None:
        """See `RowCollector`. What is too old then is given up."""
        super().begin_step(step, version, wanted=wanted)
        self.buffer.forget_before(step)

    def keep(self, kept: BufferedSequence) -> None:
        """Take a response in: to train on, or to measure on."""
        if not self._is_held_out(kept.key):
            self.buffer.add(kept)
            return
        insort(self._held_out, kept, key=attrgetter("place"))
        del self._held_out[: -self.settings.held_out]

    def state_dict(self) -> dict[str, Any]:
        """Buffer and held-out responses, as a tree with tensors."""
        return {
            "buffer": self.buffer.state_dict(),
            "held_out": [to_tree(kept) for kept in self._held_out],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.buffer.load_state_dict(state["buffer"])
        self._held_out = [from_tree(tree) for tree in state["held_out"]][-self.settings.held_out :]

    def _is_held_out(self, key: NoiseKey) -> bool:
        """By all samples of a prompt at once: siblings are alike."""
        name = f"{key.seed}/{key.epoch}/{key.uid}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
        return number % self.settings.held_out_every == 0
