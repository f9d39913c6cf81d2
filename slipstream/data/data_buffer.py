"""Supplies prompts in order, and knows its exact position.

This is the only stateful part of the data path. The order is a function of a seed and a position,
so a restored buffer continues with exactly the next prompt. Knows nothing of rollouts. Called by
the rollout manager; its state is part of checkpoints.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

from slipstream.checkpoint.saved import REMEDY, Saved, drawn_from, is_same, restoring
from slipstream.data.keyed import KeyedDraws
from slipstream.errors import ConfigError, DataError
from slipstream.reading import shown
from slipstream.types import Prompt

State = dict[str, Any]
"""A saved position; contains only JSON types."""


@runtime_checkable
class PromptSource(Protocol):
    """An endless supply of prompts, with a position that can be saved and restored."""

    def next_prompt(self) -> Prompt:
        """Return the next prompt. There is always one."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class FiniteSource(PromptSource, Protocol):
    """A source that is divided into epochs."""

    epoch_id: int
    sample_offset: int

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        ...


@runtime_checkable
class ListeningSource(PromptSource, Protocol):
    """A source that may adapt to the batches that were trained on."""

    @property
    def listens(self) -> bool:
        """Whether `on_batch_end` must be called."""
        ...

    def place_of(self, uid: str) -> int:
        """Return the data set index of a prompt that was drawn."""
        ...

    def on_batch_end(self, batch: Any) -> None:
        """Tell the source that `batch` (verl's `DataProto`) was trained on."""
        ...


class PromptTask(Protocol):
    """A task whose prompts are addressed by split and index, such as the countdown task."""

    name: str

    def prompt(self, split: Literal["train", "held_out"], index: int) -> Prompt:
        """Return the prompt at `index`. Equal arguments always give the same prompt."""
        ...

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that determine all prompts, as JSON types."""
        ...


class ListSource:
    """Repeats a finite list. Each pass is an epoch, with its own seeded shuffle.

    Sets `Prompt.epoch`. Raises DataError for an empty list, and for prompts with equal uid, since
    they would share sampling noise.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int | str, shuffle: bool) -> None:
        if not prompts:
            raise DataError("no prompts: the dataset is empty")
        uid, count = Counter(p.uid for p in prompts).most_common(1)[0]
        if count > 1:
            raise DataError(
                f"prompt uid {uid!r} occurs {count} times; every prompt of a source needs a "
                "unique uid"
            )
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self.epoch_id = 0
        self.sample_offset = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def uids(self) -> list[str]:
        return [p.uid for p in self._prompts]

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = range(len(self._prompts))
        if not self._shuffle:
            return order
        return KeyedDraws("epoch-order", self._seed, epoch).shuffled(order)

    @property
    def drawn(self) -> int:
        """The number of prompts drawn since the start."""
        return self.epoch_id * len(self._prompts) + self.sample_offset

    def next_prompt(self) -> Prompt:
        if self.sample_offset == len(self._prompts):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order = self._order_of(self.epoch_id)
        prompt = self._prompts[self._order[self.sample_offset]]
        self.sample_offset += 1
        return replace(prompt, epoch=self.epoch_id)

    def _identity(self) -> State:
        # The content is included, because files may be edited without being renamed.
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self._prompts:
            digest.update(f"{prompt.uid}\x1f{prompt.ids}\x1f{prompt.ground_truth!r}\x1e".encode())
        return {
            "kind": "list",
            "prompts": len(self._prompts),
            "content": digest.hexdigest(),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def state_dict(self) -> State:
        return {
            **self._identity(),
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if it belongs to another list."""
        saved = saved_position(state, self._identity(), "epoch_id", "sample_offset")
        epoch = saved["epoch_id"].count()
        self.sample_offset = saved["sample_offset"].count(len(self._prompts))
        self.epoch_id = epoch
        self._order = self._order_of(self.epoch_id)


class TaskSource:
    """The prompts of an endless task, by index from `start`. There are no epochs."""

    def __init__(
        self,
        task: PromptTask,
        split: Literal["train", "held_out"] = "train",
        *,
        start: int = 0,
    ) -> None:
        self._task = task
        self._split: Literal["train", "held_out"] = split
        self._start = self.index = start

    @property
    def drawn(self) -> int:
        """The number of prompts drawn since the start."""
        return self.index - self._start

    def next_prompt(self) -> Prompt:
        prompt = self._task.prompt(self._split, self.index)
        self.index += 1
        return prompt

    def _identity(self) -> State:
        return {
            "kind": "task",
            "task": self._task.name,
            "split": self._split,
            "parameters": self._task.parameters(),
        }

    def state_dict(self) -> State:
        return {**self._identity(), "index": self.index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if it belongs to another task or split."""
        saved = saved_position(state, self._identity(), "index")
        self.index = saved["index"].count(least=self._start)


class MixtureSource:
    """Draws each prompt from one of several sources, with the given weights.

    Which source is drawn depends on the seed and the number of earlier draws. Each source has its
    own position and epochs. A source may also be a finite list, which is shuffled.
    """

    def __init__(
        self, parts: Sequence[tuple[PromptSource | Sequence[Prompt], float]], *, seed: int
    ) -> None:
        if not parts:
            raise ConfigError("mixture: no sources")
        weights = [float(weight) for _, weight in parts]
        if any(not 0.0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"mixture: weights must be positive and finite, got {weights}")
        self._sources: list[PromptSource] = [
            part
            if isinstance(part, PromptSource)
            else ListSource(part, seed=f"{seed}/{place}", shuffle=True)
            for place, (part, _) in enumerate(parts)
        ]
        owners = Counter(u for s in self._sources if isinstance(s, ListSource) for u in s.uids)
        shared = [uid for uid, count in owners.items() if count > 1]
        if shared:
            raise DataError(
                f"mixture: prompt uid {shared[0]!r} occurs in {owners[shared[0]]} sources "
                f"({len(shared)} such uids): rename files that have equal names; to draw a source "
                "more often, raise its weight"
            )
        self._weights = weights
        self._seed = seed
        self.drawn = 0

    def next_prompt(self) -> Prompt:
        unit = KeyedDraws("mixture", self._seed, self.drawn).unit() * sum(self._weights)
        self.drawn += 1
        for source, weight in zip(self._sources, self._weights, strict=True):
            unit -= weight
            if unit < 0.0:
                return source.next_prompt()
        # Reached only by a rounding error of the sum.
        return self._sources[-1].next_prompt()

    def _identity(self) -> State:
        return {"kind": "mixture", "weights": self._weights, "seed": self._seed}

    def state_dict(self) -> State:
        return {
            **self._identity(),
            "drawn": self.drawn,
            "sources": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position in every source. Raises DataError for another mixture."""
        saved = saved_position(state, self._identity(), "drawn", "sources")
        drawn = saved["drawn"].count()
        states = saved["sources"].elements(len(self._sources))
        for source, part in zip(self._sources, states, strict=True):
            with restoring(part.place):
                source.load_state_dict(part.value)
        parts = [drawn_from(source) for source in self._sources]
        known = [count for count in parts if count is not None]
        if sum(known) > drawn or (len(known) == len(parts) and sum(known) != drawn):
            raise DataError(
                f"data position: drawn is {drawn}, but the sources are at {parts}; {REMEDY}"
            )
        self.drawn = drawn


class DataBuffer:
    """Returns prompts and knows its exact position.

    `prompts` is a finite list (with epochs; `shuffle` gives each a new order) or a `PromptSource`,
    which has its own order. `seed` and `shuffle` apply to lists only.
    """

    def __init__(
        self, prompts: Sequence[Prompt] | PromptSource, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._source: PromptSource = (
            prompts
            if isinstance(prompts, PromptSource)
            else ListSource(prompts, seed=seed, shuffle=shuffle)
        )

    def get_prompts(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, which may extend over the end of an epoch."""
        if n < 0:
            raise ConfigError(f"cannot get {n} prompts; ask for 0 or more")
        return [self._source.next_prompt() for _ in range(n)]

    @property
    def endless(self) -> bool:
        """Whether there are no epochs."""
        return not isinstance(self._source, FiniteSource)

    @property
    def epoch_id(self) -> int:
        """The epoch of the last returned prompt; 0 for endless sources."""
        return self._source.epoch_id if isinstance(self._source, FiniteSource) else 0

    @property
    def sample_offset(self) -> int:
        """The number of prompts returned in this epoch; 0 for endless sources."""
        return self._source.sample_offset if isinstance(self._source, FiniteSource) else 0

    def __len__(self) -> int:
        """Return the number of prompts in an epoch. Raises TypeError for an endless source."""
        if not isinstance(self._source, FiniteSource):
            raise TypeError(
                "an endless prompt source has no length; set trainer.total_training_steps"
            )
        return len(self._source)

    @property
    def listener(self) -> ListeningSource | None:
        """The source, if its `on_batch_end` must be called; else None."""
        source = self._source
        return source if isinstance(source, ListeningSource) and source.listens else None

    @property
    def drawn(self) -> int | None:
        """The number of prompts drawn since the start of the run; None if it is unknown."""
        return drawn_from(self._source)

    def __bool__(self) -> bool:
        return True

    def state_dict(self) -> State:
        """Return the position, as JSON types."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if the data are not the same."""
        self._source.load_state_dict(state)


def saved_position(state: Mapping[str, Any], identity: State, *names: str) -> dict[str, Saved]:
    """Return the entries `names` of a saved position.

    Raises DataError if it was saved with other data than those of `identity`, or if entries are
    missing or unknown.
    """
    position = Saved(state, "data position", DataError)
    found = dict(position.items())
    for key, value in identity.items():
        was = found[key].value if key in found else None
        if not is_same(was, value):
            raise DataError(
                f"data position: it was recorded with {key} = {shown(was)}, but now it is "
                f"{shown(value)}. Resume with the same data, seed, data.shuffle and "
                "data.chat_template_date, or start a new run"
            )
    saved = position.fields(*identity, *names)
    return {name: saved[name] for name in names}
