"""Prompts from data sets: order, epochs, positions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.environment.data_buffer import DataBuffer
from slipstream.environment.dataset_source import DatasetSource
from slipstream.environment.datasets import PromptReader
from slipstream.errors import DataError
from tests.environment.helpers import char_tokenizer


class Letters:
    """A data set that is told of batches."""

    def __init__(self, size: int, uid: Any = None) -> None:
        self.size, self.uid = size, uid
        self.batches: list[Any] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {"input_ids": [65 + index], "place": index}
        return item if self.uid is None else {**item, "uid": self.uid}

    def on_batch_end(self, batch: Any) -> None:
        self.batches.append(batch)
        self.size += 1


class Often(torch.utils.data.Sampler[int]):
    """The first item again and again; its order depends on how often it was asked."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        yield from [0] * (self.length - 1)
        yield self.asked % 3


def source(dataset: Any, sampler: Any = None, *, shuffle: bool = False) -> DatasetSource:
    reader = PromptReader(tokenizer=char_tokenizer(), max_prompt_length=9)
    return DatasetSource(dataset, reader, seed=1, shuffle=shuffle, sampler=sampler)


def draw(buffer: DataBuffer, n: int) -> list[tuple[str, int]]:
    return [(chr(p.ids[0]), p.epoch) for p in buffer.get_prompts(n)]


def test_epochs_in_order_and_shuffled() -> None:
    buffer = DataBuffer(source(Letters(3)))
    assert draw(buffer, 5) == [("A", 0), ("B", 0), ("C", 0), ("A", 1), ("B", 1)]
    assert (buffer.epoch_id, buffer.sample_offset, len(buffer), buffer.endless) == (1, 2, 3, False)
    shuffled = DataBuffer(source(Letters(20), shuffle=True))
    epochs = [draw(shuffled, 20) for _ in range(2)]
    assert sorted(epochs[0]) == [(chr(65 + i), 0) for i in range(20)]
    assert [letter for letter, _ in epochs[0]] != [letter for letter, _ in epochs[1]]


def test_what_is_drawn_twice_in_an_epoch_has_other_noise() -> None:
    buffer = DataBuffer(source(Letters(3), Often(3)))
    assert draw(buffer, 4) == [("A", 0), ("A", 1), ("B", 0), ("A", 2)]
    assert len(buffer) == 3


@pytest.mark.parametrize("drawn", [0, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_position_is_restored(drawn: int, shuffle: bool, sampled: bool) -> None:
    def make() -> DataBuffer:
        return DataBuffer(source(Letters(5), Often(3) if sampled else None, shuffle=shuffle))

    one = make()
    draw(one, drawn)
    state = json.loads(json.dumps(one.state_dict()))
    other = make()
    other.load_state_dict(state)
    assert draw(other, 9) == draw(one, 9)


def test_a_data_set_is_told_and_may_grow() -> None:
    dataset = Letters(2)
    buffer = DataBuffer(source(dataset))
    draw(buffer, 1)
    assert buffer.listener is not None
    buffer.listener.on_batch_end("batch")
    assert dataset.batches == ["batch"]
    # The new row is of the next epoch.
    assert draw(buffer, 4) == [("B", 0), ("A", 1), ("B", 1), ("C", 1)]
    assert buffer.listener.place_of("Letters:2") == 2


def test_a_list_does_not_listen() -> None:
    dataset = [{"input_ids": [65]}]
    assert DataBuffer(source(dataset)).listener is None


def test_bad_data_sets_are_named() -> None:
    with pytest.raises(DataError, match="list has no rows: give it data files"):
        source([])
    with pytest.raises(DataError, match="object has no length: give the class"):
        source(object())
    same = DataBuffer(source(Letters(2, uid="x")))
    with pytest.raises(DataError, match=r"Letters\[1\] has the uid 'x' of Letters\[0\]"):
        draw(same, 2)
    short = Often(3)
    buffer = DataBuffer(source(Letters(3), short))
    short.length = 1
    with pytest.raises(DataError, match="has a length of 3 and yields fewer places"):
        draw(buffer, 3)
    other = DataBuffer(source([{"input_ids": [65]}]))
    with pytest.raises(DataError, match="recorded with dataset = 'list'"):
        DataBuffer(source(Letters(2))).load_state_dict(other.state_dict())
