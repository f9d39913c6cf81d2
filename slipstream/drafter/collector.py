"""Collects rows of an RL step, with the policy's features, for training the draft head.

A `FeatureSink`: it selects rows before the trainer's forward pass and then receives their hidden
states, which that pass computes anyway. Features that an engine already computed during decoding
(`decoded`) are used instead. Runs on the trainer's compute thread.
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

from slipstream.checkpoint.saved import Saved, restoring
from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.buffer import BufferedSequence, DraftBuffer, from_tree, to_tree
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.sequences import DraftSequence
from slipstream.errors import ConfigError
from slipstream.training.columns import rows_of_column
from slipstream.types import Features, NoiseKey, PolicyVersion, SamplingParams, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """Which rows are collected, and how much of each.

    One prompt in `held_out_every` is held out: its responses are never trained on, and the newest
    `held_out` of them measure acceptance. `params` are the sampling parameters of the responses.
    Rows are cut after `max_length` tokens. `aux_layers` are the head's (`DraftModel`). Raises
    ConfigError for values that are too small.
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
    """A `FeatureSink` that turns the rows of a step into `BufferedSequence`s.

    Each has the features of all tokens except the last one: nothing is predicted from the last
    token, and the engine does not compute its features.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        keep: Callable[[BufferedSequence], None],
        decoded: DecodedFeatures | None = None,
    ) -> None:
        """`keep` is called with every row. `decoded` holds features from decoding, if any."""
        self.aux_layers = settings.aux_layers
        self._settings = settings
        self._keep = keep
        self._decoded = decoded
        self._wanted, self._step, self._version = False, 0, 0

    def begin_step(self, step: int, version: PolicyVersion, *, wanted: bool = True) -> None:
        """Prepare for the rows of RL step `step`, and collect them if `wanted`. `version` is the
        newest policy version that wrote a part of them."""
        self._wanted, self._step, self._version = wanted, step, version

    def select(self, batch: TrainBatch) -> set[int]:
        """The rows whose features are needed from the forward pass: rows with a known noise key and
        at least one token to draft. Rows with features from decoding are collected here instead."""
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
        """Collect the features of one selected row."""
        hidden = features.hidden
        if features.aux_layers is not None:
            hidden = torch.cat([features.aux_layers, hidden], -1)
        self._add(features.tokens, features.loss_mask, hidden, features.key)

    def _add(
        self, tokens: list[int], loss_mask: list[float], hidden: Tensor, key: NoiseKey | None
    ) -> None:
        assert key is not None, "only rows with a key are selected"
        length = self._settings.max_length
        rows = min(len(tokens) - 1, length)
        if len(hidden) > rows:
            # Clone, because a slice would keep the memory of the whole tensor.
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
    """Collects the rows of a step for a trainer in another process."""

    def __init__(self, settings: CollectorSettings, decoded: DecodedFeatures | None = None) -> None:
        self._entries: list[BufferedSequence] = []
        super().__init__(settings, lambda entry: self._entries.append(entry), decoded)

    def take(self) -> list[BufferedSequence]:
        """Return the rows collected since the last call."""
        entries, self._entries = self._entries, []
        return entries


class FeatureCollector(RowCollector):
    """Collects rows into a training buffer and a small set of held-out responses."""

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
        """The newest held-out responses."""
        params = self.settings.params
        return [HeldOut(sequence=e.sequence, key=e.key, params=params) for e in self._held_out]

    def begin_step(self, step: int, version: PolicyVersion, *, wanted: bool = True) -> None:
        """Prepare for the rows of a step (`RowCollector`), and drop buffered rows that are too
        old."""
        super().begin_step(step, version, wanted=wanted)
        self.buffer.drop_before(step)

    @property
    def entries(self) -> list[BufferedSequence]:
        """All responses: those to train on, and the held-out ones."""
        return [*self.buffer, *self._held_out]

    def keep(self, entry: BufferedSequence) -> None:
        """Add a response to the buffer, or to the held-out set if its prompt is held out."""
        if not self._is_held_out(entry.key):
            self.buffer.add(entry)
            return
        insort(self._held_out, entry, key=attrgetter("sort_key"))
        del self._held_out[: -self.settings.held_out]

    def state_dict(self) -> dict[str, Any]:
        """Buffer and held-out responses, as a tree with tensors."""
        return {
            "buffer": self.buffer.state_dict(),
            "held_out": [to_tree(entry) for entry in self._held_out],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        saved = Saved(state).fields("buffer", "held_out")
        held_out = []
        for entry in saved["held_out"].elements():
            with restoring(entry.place):
                held_out.append(from_tree(entry.value))
        with restoring("buffer"):
            self.buffer.load_state_dict(saved["buffer"].value)
        self._held_out = held_out[-self.settings.held_out :]

    def _is_held_out(self, key: NoiseKey) -> bool:
        """Whether this prompt is held out. All samples of a prompt are, because they are alike."""
        name = f"{key.seed}/{key.epoch}/{key.uid}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
        return number % self.settings.held_out_every == 0
