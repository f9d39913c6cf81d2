"""A `PromptSource` for map-style data sets, with one item at a time, in a sampler's order.

Used for data sets that are classes: verl's, and user-defined ones. An item is read only when its
prompt is needed, so a data set may change between steps. Called by the data buffer.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from slipstream.checkpoint.saved import MOST, MOST_REPEATS, REMEDY, Saved, restoring
from slipstream.data.data_buffer import State, saved_position
from slipstream.data.datasets import PromptReader
from slipstream.data.items import as_prompt
from slipstream.data.keyed import KeyedDraws
from slipstream.data.samplers import PassRateSampler
from slipstream.errors import DataError
from slipstream.types import Prompt
from slipstream.user_code import called

log = logging.getLogger(__name__)

_POSITION = (
    "epoch_id", "sample_offset", "epoch_length", "drawn", "places", "sampler_state",
    "dataset_state",
)  # fmt: skip


class DatasetSource:
    """Repeats the items of `dataset` (`__len__`, `__getitem__`).

    `sampler` yields the item indices of an epoch. None: all indices, with `shuffle` in a new order
    each epoch. `collate` makes a batch of items and is called with one item at a time. A prompt
    that is drawn again gets the next `epoch` number, so that its sampling noise differs. Prompts
    that are too long are skipped if the `reader` filters them. If data set or sampler have
    `state_dict` and `load_state_dict`, their state goes into checkpoints. `on_batch_end(batch)` and
    `update(batch)` are called after each step. Raises DataError for an empty data set, and for any
    error of user code, naming the method.
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
        self._skipped_any = False
        self.epoch_id = 0
        self.sample_offset = 0
        self._length = self._epoch_length()
        content = (
            called(dataset.identity, f"{self._name}.identity") if _has(dataset, "identity") else ""
        )
        self._identity = {
            "kind": "dataset",
            "dataset": self._name,
            "rows": called(len, f"{self._name}.__len__", dataset),
            "content": content,
            "sampler": None if sampler is None else type(sampler).__name__,
            "seed": seed,
            "shuffle": shuffle,
        }
        if _has(sampler, "update") and not _has(sampler, "state_dict"):
            log.warning(
                "%s has update() but no state_dict(): after a resume it starts without what it "
                "has learned",
                type(sampler).__name__,
            )
        for part in (sampler, dataset):
            if _has(part, "state_dict") and not _has(part, "load_state_dict"):
                raise DataError(
                    f"{type(part).__name__} has state_dict but not load_state_dict; define both"
                )
        self.state_dict()  # raises now, not at the first checkpoint
        self._order: Iterator[int] | None = None  # the epoch has not started

    def __len__(self) -> int:
        return self._length

    @property
    def drawn(self) -> int | None:
        """The number of prompts drawn since the start; None if it is unknown."""
        return None if self._sampler is None else sum(self._drawn.values())

    def next_prompt(self) -> Prompt:
        skipped = 0
        while True:
            if self.sample_offset >= self._length:
                self.epoch_id += 1
                self.sample_offset = 0
                self._length = self._epoch_length()
                self._order = None
            prompt = self._prompt(self._next_place())
            self.sample_offset += 1
            if prompt is not None:
                return prompt
            skipped += 1
            if skipped > self._length:
                raise DataError(
                    f"no item of {self._name} can be used: {skipped} in a row have more than "
                    f"data.max_prompt_length={self._reader.max_prompt_length} tokens, or their "
                    "chat template failed; raise it, or set data.truncation and "
                    "data.filter_overlong_prompts=false"
                )

    def _prompt(self, index: int) -> Prompt | None:
        """Return the prompt of an item, or None if it is skipped."""
        where, reader = f"{self._name}[{index}]", self._reader
        render = partial(as_prompt, self._item(index), reader=reader, name=self._name, index=index)
        loaded = reader.keep([(index, where, render)])
        if not loaded.prompts:
            if not self._skipped_any:
                why = loaded.failed or [f"{where}, of more tokens than data.max_prompt_length,"]
                log.warning("%s is skipped, like all such items", why[0])
            self._skipped_any = True
            return None
        (prompt,) = loaded.prompts
        if self._places.setdefault(prompt.uid, index) != index:
            raise DataError(
                f"{where} has the uid {prompt.uid!r} of {self._name}"
                f"[{self._places[prompt.uid]}]; every item needs a unique uid, or none"
            )
        times = self.epoch_id
        if self._sampler is not None:  # a sampler may draw an item more than once in an epoch
            times = self._drawn.get(prompt.uid, 0)
            self._drawn[prompt.uid] = times + 1
        return replace(prompt, epoch=times)

    def _item(self, index: int) -> Any:
        where = f"{self._name}.__getitem__({index})"
        item = called(self._dataset.__getitem__, where, index)
        if self._collate is None:
            return item
        batch = called(self._collate, "collate_fn", [item])
        if not isinstance(batch, Mapping):
            raise DataError(f"collate_fn must return a mapping, got {type(batch).__name__}")
        return {key: called(_first, f"collate_fn's {key!r}", batch[key]) for key in batch}

    @property
    def listens(self) -> bool:
        """Whether data set or sampler must be told what was trained on."""
        return _has(self._dataset, "on_batch_end") or _has(self._sampler, "update")

    def place_of(self, uid: str) -> int:
        """Return the data set index of a prompt that was drawn."""
        return self._places[uid]

    def on_batch_end(self, batch: Any) -> None:
        """Pass a batch that was trained on to the sampler and to the data set."""
        for listener, method in ((self._sampler, "update"), (self._dataset, "on_batch_end")):
            if _has(listener, method):
                called(getattr(listener, method), f"{type(listener).__name__}.{method}", batch)

    def state_dict(self) -> State:
        return {
            **self._identity,
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "epoch_length": self._length,
            "drawn": dict(self._drawn),
            "places": dict(self._places),
            "sampler_state": _state(self._sampler),
            "dataset_state": _state(self._dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if it belongs to another data set."""
        saved = saved_position(state, self._identity, *_POSITION)
        _restore(self._dataset, saved["dataset_state"])
        rows = called(len, f"{self._name}.__len__", self._dataset)
        # Only a sampler may make an epoch longer than the data set.
        length = saved["epoch_length"].count(rows if self._sampler is None else MOST, least=1)
        offset = saved["sample_offset"].count(length)
        drawn = {uid: times.count(MOST_REPEATS, least=1) for uid, times in saved["drawn"].items()}
        places = {uid: place.count(rows - 1) for uid, place in saved["places"].items()}
        epoch = saved["epoch_id"].count()
        times, sampled = sum(drawn.values()), self._sampler is not None
        # Two epochs without any usable item end a run.
        if drawn.keys() != (places.keys() if sampled else set()) or (
            sampled and epoch > 2 * (1 + times)
        ):
            raise DataError(
                f"data position: epoch_id={epoch}, {len(drawn)} items in drawn, which were drawn "
                f"{times} times, and {len(places)} items in places contradict each other; {REMEDY}"
            )
        self.epoch_id, self.sample_offset, self._length = epoch, offset, length
        self._drawn, self._places = drawn, places
        _restore(self._sampler, saved["sampler_state"])
        if saved["sampler_state"].value is not None:
            draws = self._sampler.drawn if isinstance(self._sampler, PassRateSampler) else times
            if not times <= draws <= (epoch + 1) * rows:
                raise DataError(
                    f"data position: the sampler's drawn={draws} contradicts epoch_id={epoch} and "
                    f"{times} prompts that were used; {REMEDY}"
                )
            self._order = None
            return
        if self._sampler is not None:
            # Its order may depend on how often it was iterated over, so repeat all epochs.
            for epoch in range(self.epoch_id):
                for _ in islice(self._begin(epoch), self._length):
                    pass
        self._order = None
        for _ in range(self.sample_offset):
            self._next_place()

    def _epoch_length(self) -> int:
        measured = self._dataset if self._sampler is None else self._sampler
        name = type(measured).__name__
        if not _has(measured, "__len__"):
            raise DataError(f"{name} has no length: define __len__ in its class")
        length: int = called(len, f"{name}.__len__", measured)
        if length < 1:
            raise DataError(
                f"{self._name} has no rows: give it data files, set self.dataframe, or define "
                "__len__"
            )
        return length

    def _begin(self, epoch: int | None = None) -> Iterator[int]:
        """Return the item indices of an epoch, by default of the current one."""
        epoch = self.epoch_id if epoch is None else epoch
        if self._sampler is None:
            order: Sequence[int] = range(self._length)
            if self._shuffle:
                order = KeyedDraws("epoch-order", self._seed, epoch).shuffled(order)
            return iter(order)
        name = f"{type(self._sampler).__name__}.__iter__"
        if _has(self._sampler, "update") or _has(self._sampler, "state_dict"):
            return _guarded(self._sampler, name)
        # A sampler without a state may use the global random generators. Seed them, so that its
        # order is a function of the seed and the epoch.
        with _seeded(KeyedDraws("sampler", self._seed, epoch).below(1 << 31)):
            return iter(list(islice(_guarded(self._sampler, name), self._length)))

    def _next_place(self) -> int:
        if self._order is None:
            self._order = self._begin()
        for place in self._order:
            found: int = called(int, f"an index of {type(self._sampler).__name__}", place)
            count = called(len, f"{self._name}.__len__", self._dataset)
            if not 0 <= found < count:
                raise DataError(
                    f"the sampler {type(self._sampler).__name__} drew index {found} of "
                    f"{self._name}, which has {count} items"
                )
            return found
        raise DataError(
            f"the sampler {type(self._sampler).__name__} of {self._name} has a length of "
            f"{self._length} but yields fewer indices"
        )


def _first(values: Any) -> Any:
    return values[0]


def _has(part: Any, method: str) -> bool:
    return callable(getattr(part, method, None))


def _guarded(sampler: Any, name: str) -> Iterator[int]:
    """Yield what a sampler yields. Its exceptions become errors that name it."""
    places = called(iter, name, sampler)
    nothing = object()
    while (place := called(next, name, places, nothing)) is not nothing:
        yield place


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore them after the body."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _state(part: Any) -> Any:
    """Return the state of a data set or sampler, None if it has none.

    Raises DataError if the state contains other than JSON types.
    """
    if not _has(part, "state_dict"):
        return None
    name = f"{type(part).__name__}.state_dict"
    state = called(part.state_dict, name)
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} goes into checkpoints, so it must contain only strings, finite numbers, lists "
            f"and objects: {error}"
        ) from error
    return state


def _restore(part: Any, state: Saved) -> None:
    if (state.value is None) != (_state(part) is None):
        state.refuse(f"a state of {type(part).__name__}")
    if state.value is not None:
        with restoring(state.place):
            called(part.load_state_dict, f"{type(part).__name__}.load_state_dict", state.value)
