"""Responses of the last RL steps, with features: what a draft head learns from while RL goes on.

Bounded in bytes and in age. Which responses come in is the collector's matter, what is done with
them the trainer's. Shapes: T tokens, D hidden width.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from operator import attrgetter
from typing import Any

from slipstream.drafter.sequences import DraftSequence, length_buckets
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.types import NoiseKey, PolicyVersion


@dataclass(slots=True, kw_only=True)
class BufferedSequence:
    """A response of RL step `step`, whose newest policy was `version`, sampled with the noise of
    `key`; `uses` is how often it has been trained on."""

    sequence: DraftSequence
    key: NoiseKey
    step: int
    version: PolicyVersion = 0
    uses: int = 0

    @property
    def place(self) -> tuple[object, ...]:
        """Its place among others, whenever they come in."""
        return self.step, astuple(self.key)

    @property
    def nbytes(self) -> int:
        """Of the features: tokens are nothing beside them."""
        return self.sequence.features_TF.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """Limits of a `DraftBuffer`.

    Responses older than `lookback_steps` RL steps are given up, then, where the rest take more than
    `max_bytes`, the oldest; but the longest ones, up to `long_share` of the bytes, stay until they
    are too old: few responses are long, and drafts pay most there. No response is trained on more
    than `max_uses` times: many passes over the same ones overfit. Raises ConfigError for values
    that cannot be.
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
    """What has happened to a buffer so far, in responses."""

    received: int = 0
    too_old: int = 0
    evicted: int = 0


class DraftBuffer:
    """The responses, oldest first, and those of one step in an order of their own: a head should
    not depend on who came in first."""

    def __init__(self, settings: BufferSettings) -> None:
        self.settings = settings
        self.counts = BufferCounts()
        self.nbytes = 0
        self.newest_used: PolicyVersion | None = None
        """Newest policy version of what has been trained on; None before anything was."""
        self._kept: list[BufferedSequence] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: BufferedSequence) -> None:
        """Take in a response, and give up what is then too much.

        Raises ConfigError for a response larger than the whole buffer.
        """
        if kept.nbytes > self.settings.max_bytes:
            raise ConfigError(
                f"speculative.train.buffer_bytes={self.settings.max_bytes} cannot hold one "
                f"response of {len(kept.sequence.tokens)} tokens ({kept.nbytes} bytes); raise it, "
                "or lower speculative.train.max_seq_len"
            )
        insort(self._kept, kept, key=attrgetter("place"))
        self.nbytes += kept.nbytes
        self.counts.received += 1
        if self.nbytes > self.settings.max_bytes:
            self._evict()

    def forget_before(self, step: int) -> None:
        """Give up what RL step `step` does not look back to."""
        first = step - self.settings.lookback_steps + 1
        fresh = [kept for kept in self._kept if kept.step >= first]
        self.counts.too_old += len(self._kept) - len(fresh)
        self._replace(fresh)

    def batches(self, batch_size: int, key: str) -> Iterator[list[DraftSequence]]:
        """Batches of responses of similar length, those that were trained on least first, and of
        these the newest; ends when all have been trained on `max_uses` times.

        A response counts as trained on when its batch is taken. `key` decides the order where
        nothing else does.
        """
        number = 0
        while True:
            left = [kept for kept in self._kept if kept.uses < self.settings.max_uses]
            if not left:
                return
            fewest = min((kept.uses, -kept.step) for kept in left)
            part = [kept for kept in left if (kept.uses, -kept.step) == fewest]
            lengths = [len(kept.sequence.tokens) for kept in part]
            for places in length_buckets(lengths, batch_size, f"{key}/{number}"):
                chosen = [part[place] for place in places]
                for kept in chosen:
                    kept.uses += 1
                newest = max(kept.version for kept in chosen)
                self.newest_used = max(newest, self.newest_used or 0)
                yield [kept.sequence for kept in chosen]
            number += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a tree with tensors."""
        return {
            "counts": asdict(self.counts),
            "newest_used": self.newest_used,
            "kept": [to_tree(kept) for kept in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; what is beyond the settings' limits is given up."""
        self.counts = BufferCounts(**state["counts"])
        self.newest_used = state["newest_used"]
        self._replace(sorted(map(from_tree, state["kept"]), key=attrgetter("place")))
        if self.nbytes > self.settings.max_bytes:
            self._evict()

    def _replace(self, kept: list[BufferedSequence]) -> None:
        self._kept = kept
        self.nbytes = sum(one.nbytes for one in kept)

    def _evict(self) -> None:
        protected = self._longest(self.settings.long_share * self.settings.max_bytes)
        left, over = list[BufferedSequence](), self.nbytes - self.settings.max_bytes
        for kept in self._kept:
            if over > 0 and id(kept) not in protected:
                over -= kept.nbytes
                self.counts.evicted += 1
            else:
                left.append(kept)
        self._replace(left)

    def _longest(self, nbytes: float) -> set[int]:
        """The longest responses, newest first among equals, that take at most so many bytes."""
        found = set[int]()
        for kept in sorted(self._kept, key=lambda one: (-one.nbytes, -one.step)):
            nbytes -= kept.nbytes
            if nbytes < 0:
                break
            found.add(id(kept))
        return found


def to_tree(kept: BufferedSequence) -> dict[str, Any]:
    """As `checkpoint.tree` takes it."""
    sequence = kept.sequence
    return {
        "tokens": list(sequence.tokens),
        "features": sequence.features_TF,
        "loss_mask": list(sequence.loss_mask),
        "key": list(astuple(kept.key)),
        "step": kept.step,
        "version": kept.version,
        "uses": kept.uses,
    }


def from_tree(tree: Mapping[str, Any]) -> BufferedSequence:
    """What `to_tree` made."""
    return BufferedSequence(
        sequence=DraftSequence(
            tokens=tree["tokens"], features_TF=tree["features"], loss_mask=tree["loss_mask"]
        ),
        key=NoiseKey(*tree["key"]),
        step=tree["step"],
        version=tree["version"],
        uses=tree["uses"],
    )
