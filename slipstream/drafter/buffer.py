"""Replay buffer for co-training: responses of the last RL steps, with the policy's features.

The buffer is bounded in bytes and in age. The collector chooses the responses, the trainer trains
on them. Shapes: T tokens, D hidden width.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint.saved import MOST_REPEATS, Saved, restoring
from slipstream.drafter.sequences import DraftSequence, length_buckets
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.types import NoiseKey, PolicyVersion

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, kw_only=True)
class BufferedSequence:
    """A response of RL step `step`, sampled with the noise of `key`.

    `version` is the newest policy version that wrote a part of it. `uses` counts how often it was
    trained on.
    """

    sequence: DraftSequence
    key: NoiseKey
    step: int
    version: PolicyVersion = 0
    uses: int = 0

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Orders responses by step, and does not depend on when they arrived."""
        return self.step, self.key.parts

    @property
    def nbytes(self) -> int:
        """Size of the features in bytes. The tokens are negligible."""
        return self.sequence.features_TF.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """Limits of a `DraftBuffer`.

    Responses older than `lookback_steps` RL steps are dropped. If the rest exceed `max_bytes`, the
    oldest are evicted. The longest responses, up to `long_share` of the bytes, are never evicted:
    few responses are long, and drafts save most time there. Each response is trained on at most
    `max_uses` times, to avoid overfitting. Raises ConfigError for impossible values.
    """

    max_bytes: int = 1 << 28
    lookback_steps: int = 2
    long_share: float = 0.25
    max_uses: int = 10

    def __post_init__(self) -> None:
        check_at_least_one(self, "max_bytes", "lookback_steps", "max_uses", where="draft buffer: ")
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"draft buffer: long_share={self.long_share} must be in [0, 1]")


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """Numbers of responses that a buffer received, dropped as too old, and evicted for space."""

    received: int = 0
    too_old: int = 0
    evicted: int = 0


class DraftBuffer:
    """Buffered responses, oldest first. Within a step they are ordered by noise key, so that
    training does not depend on the order in which they finished."""

    def __init__(self, settings: BufferSettings) -> None:
        self.settings = settings
        self.counts = BufferCounts()
        self.nbytes = 0
        self.newest_used: PolicyVersion | None = None
        """Newest policy version among the responses trained on; None before the first."""
        self._entries: list[BufferedSequence] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[BufferedSequence]:
        return iter(self._entries)

    def add(self, entry: BufferedSequence) -> None:
        """Add a response; evict others if the buffer then exceeds `max_bytes`.

        Raises ConfigError for a response larger than the whole buffer.
        """
        if entry.nbytes > self.settings.max_bytes:
            raise ConfigError(
                f"speculative.train.buffer_bytes={self.settings.max_bytes} cannot hold one "
                f"response of {len(entry.sequence.tokens)} tokens ({entry.nbytes} bytes); raise "
                "it, or lower speculative.train.max_seq_len"
            )
        insort(self._entries, entry, key=attrgetter("sort_key"))
        self.nbytes += entry.nbytes
        self.counts.received += 1
        if self.nbytes > self.settings.max_bytes:
            self._evict()

    def drop_before(self, step: int) -> None:
        """Drop the responses that are too old for RL step `step`."""
        first = step - self.settings.lookback_steps + 1
        fresh = [entry for entry in self._entries if entry.step >= first]
        self.counts.too_old += len(self._entries) - len(fresh)
        self._replace(fresh)

    def batches(self, batch_size: int, key: str) -> Iterator[list[DraftSequence]]:
        """Yield batches of responses of similar length, until all reached `max_uses`.

        Prompts take turns, because responses to one prompt are alike: first come the prompts whose
        responses were used least, with one response each, the least used one. A response counts as
        used when its batch is taken. `key` seeds the order of the rest.
        """
        number = 0
        while True:
            part = self._next_in_turn()
            if not part:
                return
            lengths = [len(entry.sequence.tokens) for entry in part]
            for indices in length_buckets(lengths, batch_size, f"{key}/{number}"):
                chosen = [part[index] for index in indices]
                for entry in chosen:
                    entry.uses += 1
                newest = max(entry.version for entry in chosen)
                self.newest_used = max(newest, self.newest_used or 0)
                yield [entry.sequence for entry in chosen]
            number += 1

    def _next_in_turn(self) -> list[BufferedSequence]:
        """One response to each prompt that was used least; none if all reached `max_uses`."""
        used = Counter[Hashable]()
        candidates: dict[Hashable, BufferedSequence] = {}
        for entry in self._entries:
            prompt = entry.key.prompt
            used[prompt] += entry.uses
            best = candidates.get(prompt)
            if entry.uses < self.settings.max_uses and (best is None or entry.uses < best.uses):
                candidates[prompt] = entry
        least = min((used[prompt] for prompt in candidates), default=0)
        return [entry for prompt, entry in candidates.items() if used[prompt] == least]

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as a tree with tensors."""
        return {
            "counts": asdict(self.counts),
            "newest_used": self.newest_used,
            "kept": [to_tree(entry) for entry in self._entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Evicts responses if the settings' limits are lower now."""
        saved = Saved(state).fields("counts", "newest_used", "kept")
        counts: BufferCounts = saved["counts"].of(BufferCounts)
        if min(astuple(counts)) < 0 or counts.too_old + counts.evicted > counts.received:
            saved["counts"].refuse("counts of responses, with too_old + evicted at most received")
        newest = saved["newest_used"]
        newest_used = None if newest.value is None else newest.count()
        entries = sorted(map(_from_saved, saved["kept"].elements()), key=attrgetter("sort_key"))
        self.counts, self.newest_used = counts, newest_used
        self._replace(entries)
        if self.nbytes > self.settings.max_bytes:
            self._evict()

    def _replace(self, entries: list[BufferedSequence]) -> None:
        self._entries = entries
        self.nbytes = sum(entry.nbytes for entry in entries)

    def _evict(self) -> None:
        protected = self._longest(self.settings.long_share * self.settings.max_bytes)
        left, excess = list[BufferedSequence](), self.nbytes - self.settings.max_bytes
        for entry in self._entries:
            if excess > 0 and id(entry) not in protected:
                excess -= entry.nbytes
                self.counts.evicted += 1
            else:
                left.append(entry)
        self._replace(left)

    def _longest(self, nbytes: float) -> set[int]:
        """Ids of the longest responses that fit into `nbytes`, newest first among equals."""
        found = set[int]()
        for entry in sorted(self._entries, key=lambda one: (-one.nbytes, -one.step)):
            nbytes -= entry.nbytes
            if nbytes < 0:
                break
            found.add(id(entry))
        return found


def to_tree(entry: BufferedSequence) -> dict[str, Any]:
    """A tree that `checkpoint.tree` can save."""
    sequence = entry.sequence
    return {
        "tokens": list(sequence.tokens),
        "features": sequence.features_TF,
        "loss_mask": list(sequence.loss_mask),
        "key": [*entry.key.parts],
        "step": entry.step,
        "version": entry.version,
        "uses": entry.uses,
    }


def from_tree(tree: Mapping[str, Any]) -> BufferedSequence:
    """The response of a tree that `to_tree` made. Raises CheckpointError for any other tree."""
    return _from_saved(Saved(tree))


def _from_saved(saved: Saved) -> BufferedSequence:
    part = saved.fields("tokens", "features", "loss_mask", "key", "step", "version", "uses")
    features = part["features"].value
    if not (isinstance(features, Tensor) and features.ndim == 2 and features.dtype in _DTYPES):
        part["features"].refuse("a tensor of hidden states (tokens, width) in fp32, bf16 or fp16")
    key = part["key"].elements(len(fields(NoiseKey)))
    named = {f.name: value.value for f, value in zip(fields(NoiseKey), key, strict=True)}
    for name in ("epoch", "index", "branch", "attempt"):
        Saved(named[name], f"{part['key'].place} ({name})").count(MOST_REPEATS)
    with restoring(saved.place or "the response"):
        return BufferedSequence(
            sequence=DraftSequence(
                tokens=part["tokens"].of(list[int]),
                features_TF=part["features"].tensor(features),
                loss_mask=part["loss_mask"].of(list[float]),
            ),
            key=Saved(named, part["key"].place).of(NoiseKey),
            step=part["step"].count(),
            version=part["version"].count(),
            uses=part["uses"].count(MOST_REPEATS),
        )
