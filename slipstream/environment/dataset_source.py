"""Prompts from a map-style data set, in the order of a sampler, item by item.

The `PromptSource` of data sets that are classes: VERL's, and a user's own. An item is asked for
when its prompt is due, so that a data set may change between steps. Called by the data buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.environment.data_buffer import State, check_identity, count_in
from slipstream.environment.datasets import PromptReader
from slipstream.environment.items import as_prompt
from slipstream.environment.keyed import KeyedDraws
from slipstream.errors import DataError
from slipstream.types import Prompt


class DatasetSource:
    """Items of `dataset` (`__len__`, `__getitem__`) again and again.

    `sampler` yields the places of an epoch; None: all of them, shuffled anew each time with
    `shuffle`. `collate` makes a batch of items, and gets them one by one. A prompt that is drawn
    again gets the next `epoch`, so that it has other noise. Data set and sampler may have
    `state_dict` and `load_state_dict`, which go into checkpoints; `on_batch_end(batch)` and
    `update(batch)` are called after each step. Raises `DataError` for a data set without rows.
    """

    def __init__(
        self,
        dataset: Any,
        reader: PromptReader,
        *,
        seed: int | str,
        shuffle: bool,
        sampler: Any = None,
        collate: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._dataset, self._sampler, self._collate = dataset, sampler, collate
        self._reader = reader
        self._seed, self._shuffle = seed, shuffle
        self._name = type(dataset).__name__
        self._drawn: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self.epoch_id = 0
        self.sample_offset = 0
        self._length = self._epoch_length()
        self._order = self._begin()

    def __len__(self) -> int:
        return self._length

    def next_prompt(self) -> Prompt:
        if self.sample_offset >= self._length:
            self.epoch_id += 1
            self.sample_offset = 0
            self._length = self._epoch_length()
            self._order = self._begin()
        index = self._next_place()
        prompt = as_prompt(self._item(index), reader=self._reader, name=self._name, index=index)
        if self._places.setdefault(prompt.uid, index) != index:
            raise DataError(
                f"{self._name}[{index}] has the uid {prompt.uid!r} of {self._name}"
                f"[{self._places[prompt.uid]}]; every item needs its own, or none"
            )
        times = self.epoch_id
        if self._sampler is not None:  # which may draw an item more than once in an epoch
            times = self._drawn.get(prompt.uid, 0)
            self._drawn[prompt.uid] = times + 1
        self.sample_offset += 1
        return replace(prompt, epoch=times)

    def _item(self, index: int) -> Any:
        item = self._dataset[index]
        if self._collate is None:
            return item
        return {key: values[0] for key, values in self._collate([item]).items()}

    @property
    def listens(self) -> bool:
        """Whether anything wants to know what was trained on."""
        return hasattr(self._dataset, "on_batch_end") or hasattr(self._sampler, "update")

    def place_of(self, uid: str) -> int:
        """Where in the data set a prompt that was drawn has come from."""
        return self._places[uid]

    def on_batch_end(self, batch: Any) -> None:
        """Tell the sampler and the data set of a batch that was trained on."""
        for listener, method in ((self._sampler, "update"), (self._dataset, "on_batch_end")):
            if hasattr(listener, method):
                getattr(listener, method)(batch)

    def state_dict(self) -> State:
        return {
            **self._identity(),
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "epoch_length": self._length,
            "drawn": dict(self._drawn),
            "places": dict(self._places),
            "sampler_state": _state(self._sampler),
            "dataset_state": _state(self._dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a recorded position. Raises `DataError` if it is another data set's."""
        check_identity(state, self._identity())
        if state.get("dataset_state") is not None:
            self._dataset.load_state_dict(state["dataset_state"])
        self.epoch_id = count_in(state, "epoch_id")
        self.sample_offset = count_in(state, "sample_offset")
        self._length = count_in(state, "epoch_length")
        self._drawn = {str(k): int(v) for k, v in state["drawn"].items()}
        self._places = {str(k): int(v) for k, v in state["places"].items()}
        if state.get("sampler_state") is not None:
            self._sampler.load_state_dict(state["sampler_state"])
            self._order = self._begin()
            return
        if self._sampler is not None:
            # What it draws may depend on how often it was iterated over.
            for _ in range(self.epoch_id):
                for _ in self._begin():
                    pass
        self._order = self._begin()
        for _ in range(self.sample_offset):
            self._next_place()

    def _identity(self) -> State:
        return {
            "kind": "dataset",
            "dataset": self._name,
            "sampler": None if self._sampler is None else type(self._sampler).__name__,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _epoch_length(self) -> int:
        try:
            length = len(self._dataset if self._sampler is None else self._sampler)
        except TypeError as error:
            raise DataError(
                f"{self._name} or its sampler has no length: give the class a __len__"
            ) from error
        if length < 1:
            raise DataError(
                f"{self._name} has no rows: give it data files, set self.dataframe, or define "
                "__len__"
            )
        return length

    def _begin(self) -> Iterator[int]:
        if self._sampler is not None:
            return iter(self._sampler)
        order: Sequence[int] = range(self._length)
        if self._shuffle:
            order = KeyedDraws("epoch-order", self._seed, self.epoch_id).shuffled(order)
        return iter(order)

    def _next_place(self) -> int:
        for place in self._order:
            return int(place)
        raise DataError(
            f"the sampler {type(self._sampler).__name__} of {self._name} has a length of "
            f"{self._length} and yields fewer places"
        )


def _state(part: Any) -> Any:
    """What a part keeps, if it keeps anything."""
    return part.state_dict() if hasattr(part, "state_dict") else None
