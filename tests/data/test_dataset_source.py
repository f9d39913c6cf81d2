"""`DatasetSource` draws items of data sets in order, with epochs and restorable positions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.data.data_buffer import DataBuffer
from slipstream.data.dataset_source import DatasetSource
from slipstream.data.datasets import PromptReader
from slipstream.errors import DataError
from tests.data.helpers import char_tokenizer


class Letters:
    """A data set of single letters that records batches and grows after each."""

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


class MostlyFirst(torch.utils.data.Sampler[int]):
    """Yields the first item repeatedly. Its order depends on the number of iterations."""

    def __init__(self, length: int) -> None:
        self.length, self.iterations = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        yield from [0] * (self.length - 1)
        yield self.iterations % 3


def source(dataset: Any, sampler: Any = None, *, shuffle: bool = False) -> DatasetSource:
    reader = PromptReader(tokenizer=char_tokenizer(), max_prompt_length=9)
    return DatasetSource(dataset, reader, seed=1, shuffle=shuffle, sampler=sampler)


def draw(buffer: DataBuffer, n: int) -> list[tuple[str, int]]:
    return [(chr(p.ids[0]), p.epoch) for p in buffer.get_prompts(n)]


def test_epochs_are_in_order_or_shuffled() -> None:
    buffer = DataBuffer(source(Letters(3)))
    assert draw(buffer, 5) == [("A", 0), ("B", 0), ("C", 0), ("A", 1), ("B", 1)]
    assert (buffer.epoch_id, buffer.sample_offset, len(buffer), buffer.endless) == (1, 2, 3, False)
    shuffled = DataBuffer(source(Letters(20), shuffle=True))
    epochs = [draw(shuffled, 20) for _ in range(2)]
    assert sorted(epochs[0]) == [(chr(65 + i), 0) for i in range(20)]
    assert [letter for letter, _ in epochs[0]] != [letter for letter, _ in epochs[1]]


def test_an_item_drawn_again_gets_a_new_epoch_number() -> None:
    buffer = DataBuffer(source(Letters(3), MostlyFirst(3)))
    assert draw(buffer, 4) == [("A", 0), ("A", 1), ("B", 0), ("A", 2)]
    assert len(buffer) == 3


@pytest.mark.parametrize("drawn", [0, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_positions_are_restored(drawn: int, shuffle: bool, sampled: bool) -> None:
    def make() -> DataBuffer:
        return DataBuffer(source(Letters(5), MostlyFirst(3) if sampled else None, shuffle=shuffle))

    one = make()
    draw(one, drawn)
    state = json.loads(json.dumps(one.state_dict()))
    other = make()
    other.load_state_dict(state)
    assert draw(other, 9) == draw(one, 9)


def test_the_data_set_gets_batches_and_may_grow() -> None:
    dataset = Letters(2)
    buffer = DataBuffer(source(dataset))
    draw(buffer, 1)
    assert buffer.listener is not None
    buffer.listener.on_batch_end("batch")
    assert dataset.batches == ["batch"]
    # The new row is drawn from the next epoch on.
    assert draw(buffer, 4) == [("B", 0), ("A", 1), ("B", 1), ("C", 1)]
    assert buffer.listener.place_of("Letters:2") == 2


def test_a_list_has_no_listener() -> None:
    dataset = [{"input_ids": [65]}]
    assert DataBuffer(source(dataset)).listener is None


def test_invalid_data_sets_and_samplers_are_refused() -> None:
    with pytest.raises(DataError, match="list has no rows: give it data files"):
        source([])
    with pytest.raises(DataError, match="object has no length: define __len__"):
        source(object())
    same = DataBuffer(source(Letters(2, uid="x")))
    with pytest.raises(DataError, match=r"Letters\[1\] has the uid 'x' of Letters\[0\]"):
        draw(same, 2)
    short = MostlyFirst(3)
    buffer = DataBuffer(source(Letters(3), short))
    short.length = 1
    with pytest.raises(DataError, match="has a length of 3 but yields fewer indices"):
        draw(buffer, 3)
    other = DataBuffer(source([{"input_ids": [65]}]))
    with pytest.raises(DataError, match="recorded with dataset = 'list'"):
        DataBuffer(source(Letters(2))).load_state_dict(other.state_dict())


class GlobalRandom(torch.utils.data.Sampler[int]):
    """Draws indices from a global random generator."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.draw()


@pytest.mark.parametrize(
    "draw_one",
    [
        lambda: random.randrange(5),
        lambda: int(np.random.randint(5)),
        lambda: int(torch.randint(5, ())),
    ],
)
def test_samplers_with_global_generators_depend_on_the_seed_only(
    draw_one: Callable[[], int],
) -> None:
    def make() -> DataBuffer:
        return DataBuffer(source(Letters(5), GlobalRandom(draw_one)))

    before = random.getstate(), torch.get_rng_state()
    one = make()
    first = draw(one, 6)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    draw_one()
    assert draw(make(), 6) == first
    # A sampler that never ends is restored too.
    other = make()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert draw(other, 7) == draw(one, 7)


def test_overlong_items_are_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    items = [{"input_ids": [65] * n} for n in (3, 12, 2, 30)]
    buffer = DataBuffer(source(items))
    assert [len(p.ids) for p in buffer.get_prompts(4)] == [3, 2, 3, 2]
    assert "list[1], of more tokens than data.max_prompt_length, is skipped" in caplog.text
    assert caplog.text.count("is skipped") == 1
    with pytest.raises(DataError, match="no item of list can be used"):
        DataBuffer(source(items[1:2])).get_prompts(1)


def test_positions_of_changed_data_are_refused() -> None:
    class Known(Letters):
        content = "x"

        def identity(self) -> str:
            return self.content

    state = DataBuffer(source(Known(3))).state_dict()
    with pytest.raises(DataError, match="recorded with rows = 3, but now it is 4"):
        DataBuffer(source(Known(4))).load_state_dict(state)
    other = Known(3)
    other.content = "y"
    with pytest.raises(DataError, match="recorded with content = 'x', but now it is 'y'"):
        DataBuffer(source(other)).load_state_dict(state)


class Broken(Letters):
    """A data set that raises in one method."""

    def __init__(self, method: str) -> None:
        super().__init__(3)
        self.method = method

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError("boom")

    def __len__(self) -> int:
        self._fail("__len__")
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._fail("__getitem__")
        return super().__getitem__(index)

    def on_batch_end(self, batch: Any) -> None:
        self._fail("on_batch_end")

    def state_dict(self) -> dict[str, Any]:
        self._fail("state_dict")
        return {}

    def load_state_dict(self, state: Any) -> None:
        self._fail("load_state_dict")


class OneIndex(torch.utils.data.Sampler[int]):
    """Yields one given index, or raises if it is None."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        if self.place is None:
            raise RuntimeError("boom")
        yield self.place


@pytest.mark.parametrize(
    "method", ["__len__", "__getitem__", "on_batch_end", "state_dict", "load_state_dict"]
)
def test_errors_of_user_code_name_the_method(method: str) -> None:
    def use() -> None:
        buffer = DataBuffer(source(Broken(method)))
        buffer.get_prompts(1)
        assert buffer.listener is not None
        buffer.listener.on_batch_end("batch")
        buffer.load_state_dict(buffer.state_dict())

    with pytest.raises(DataError, match=rf"Broken\.{method}.* failed with RuntimeError: boom"):
        use()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (7, "drew index 7 of Letters, which has 3 items"),
        (-1, "drew index -1 of Letters"),
        ("a", "an index of OneIndex failed with ValueError"),
        (None, "OneIndex.__iter__ failed with RuntimeError: boom"),
    ],
)
def test_invalid_indices_are_refused(place: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        DataBuffer(source(Letters(3), OneIndex(place))).get_prompts(1)


def test_states_without_json_form_are_refused_when_created() -> None:
    class Stateful(Letters):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": torch.zeros(1)}

    with pytest.raises(DataError, match="Stateful has state_dict but not load_state_dict"):
        source(Stateful(2))

    class Both(Stateful):
        def load_state_dict(self, state: Any) -> None:
            pass

    with pytest.raises(DataError, match=r"Both\.state_dict goes into checkpoints"):
        source(Both(2))


def test_items_whose_template_fails_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    strict = "{% for m in messages %}{{ m.content or raise_exception('no') }}{% endfor %}"
    items = [{"raw_prompt": [{"role": "user", "content": text}]} for text in ("a", "")]
    reader = PromptReader(tokenizer=char_tokenizer(strict), max_prompt_length=9)
    buffer = DataBuffer(DatasetSource(items, reader, seed=1, shuffle=False))
    assert [p.epoch for p in buffer.get_prompts(2)] == [0, 1]
    assert "list[1] (TemplateError: no) is skipped" in caplog.text


def test_a_curriculum_without_state_dict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Learns(MostlyFirst):
        def update(self, batch: Any) -> None:
            pass

    source(Letters(2), Learns(2))
    assert "Learns has update() but no state_dict()" in caplog.text
