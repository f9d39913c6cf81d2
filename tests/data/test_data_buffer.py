"""`DataBuffer` and its sources supply prompts with exact, restorable positions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.countdown import CountdownTask
from slipstream.data.data_buffer import DataBuffer, MixtureSource, TaskSource
from slipstream.errors import ConfigError, DataError
from slipstream.types import Prompt


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [Prompt(uid=f"{name}{i}", ids=[i]) for i in range(count)]


def uids(got: list[Prompt]) -> list[str]:
    return [p.uid for p in got]


def test_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    buffer = DataBuffer(prompts(10), seed=1, shuffle=True)
    assert len(buffer) == 10
    assert not buffer.endless
    epochs = [buffer.get_prompts(10) for _ in range(3)]
    for number, got in enumerate(epochs):
        assert sorted(uids(got)) == sorted(uids(prompts(10)))
        assert {p.epoch for p in got} == {number}
    assert len({tuple(uids(got)) for got in epochs}) == 3
    assert uids(DataBuffer(prompts(10), seed=1).get_prompts(10)) == uids(epochs[0])
    assert uids(DataBuffer(prompts(10), seed=2).get_prompts(10)) != uids(epochs[0])


def test_without_shuffle_prompts_keep_their_order() -> None:
    buffer = DataBuffer(prompts(3), seed=0, shuffle=False)
    got = buffer.get_prompts(7)
    assert uids(got) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]
    assert [p.epoch for p in got] == [0, 0, 0, 1, 1, 1, 2]
    assert (buffer.epoch_id, buffer.sample_offset) == (2, 1)


def test_the_given_prompts_are_not_modified() -> None:
    given_prompts = prompts(2)
    buffer = DataBuffer(given_prompts, seed=0, shuffle=False)
    buffer.get_prompts(5)
    assert [p.epoch for p in given_prompts] == [0, 0]


@settings(max_examples=50, deadline=None)
@given(calls=st.lists(st.integers(0, 9), max_size=8), more=st.integers(1, 20))
def test_a_position_within_an_epoch_is_restored_exactly(calls: list[int], more: int) -> None:
    original = DataBuffer(prompts(7), seed=3)
    for n in calls:
        original.get_prompts(n)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = DataBuffer(prompts(7), seed=3)
    resumed.get_prompts(2)
    resumed.load_state_dict(state)
    assert resumed.get_prompts(more) == original.get_prompts(more)


def test_a_task_source_continues_at_its_index() -> None:
    task = CountdownTask(seed=5)
    buffer = DataBuffer(TaskSource(task, "train"))
    assert buffer.endless
    assert buffer.get_prompts(3) == [task.prompt("train", i) for i in range(3)]
    state = json.loads(json.dumps(buffer.state_dict()))
    resumed = DataBuffer(TaskSource(CountdownTask(seed=5), "train"))
    resumed.load_state_dict(state)
    assert uids(resumed.get_prompts(2)) == ["countdown/5/train/3", "countdown/5/train/4"]
    with pytest.raises(TypeError, match=r"set trainer\.total_training_steps"):
        len(buffer)
    started = DataBuffer(TaskSource(task, "train", start=100))
    assert uids(started.get_prompts(1)) == ["countdown/5/train/100"]


def mixture(seed: int = 0) -> MixtureSource:
    return MixtureSource(
        [(prompts(5, "a"), 3.0), (prompts(4, "b"), 1.0), (TaskSource(CountdownTask(1)), 1.0)],
        seed=seed,
    )


def test_a_mixture_draws_with_its_weights() -> None:
    got = DataBuffer(mixture()).get_prompts(2000)
    shares = Counter(p.uid[0] for p in got)
    # 1,200 / 400 / 400 expected, standard deviations under 22.
    assert abs(shares["a"] - 1200) < 110
    assert abs(shares["b"] - 400) < 90
    assert abs(shares["c"] - 400) < 90
    a = [p for p in got if p.uid[0] == "a"]
    for start in range(0, 50, 5):
        assert len({p.uid for p in a[start : start + 5]}) == 5
        assert {p.epoch for p in a[start : start + 5]} == {start // 5}


def test_a_mixture_is_deterministic_and_restores_all_sources() -> None:
    assert DataBuffer(mixture()).get_prompts(50) == DataBuffer(mixture()).get_prompts(50)
    assert uids(DataBuffer(mixture(1)).get_prompts(50)) != uids(
        DataBuffer(mixture()).get_prompts(50)
    )
    original = DataBuffer(mixture())
    original.get_prompts(33)
    resumed = DataBuffer(mixture())
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert resumed.get_prompts(60) == original.get_prompts(60)


def test_positions_of_other_data_are_refused() -> None:
    state = DataBuffer(prompts(5), seed=0).state_dict()
    for other, key in (
        (DataBuffer(prompts(6), seed=0), "prompts"),
        (DataBuffer(prompts(5, "q"), seed=0), "content"),
        (DataBuffer([replace(p, ids=[9]) for p in prompts(5)], seed=0), "content"),
        (DataBuffer(prompts(5), seed=1), "seed"),
        (DataBuffer(prompts(5), seed=0, shuffle=False), "shuffle"),
        (DataBuffer(TaskSource(CountdownTask())), "kind"),
    ):
        with pytest.raises(DataError, match=f"recorded with {key} = "):
            other.load_state_dict(state)
    task_state = TaskSource(CountdownTask(1)).state_dict()
    with pytest.raises(DataError, match="recorded with parameters"):
        TaskSource(CountdownTask(2)).load_state_dict(task_state)
    with pytest.raises(DataError, match="recorded with weights"):
        MixtureSource([(prompts(2), 1.0)], seed=0).load_state_dict(mixture().state_dict())


@pytest.mark.parametrize("change", [{"epoch_id": -1}, {"sample_offset": None}, {"epoch_id": True}])
def test_corrupt_positions_are_refused(change: dict[str, Any]) -> None:
    buffer = DataBuffer(prompts(5), seed=0)
    with pytest.raises(DataError, match=rf"position\.{next(iter(change))} is .*; resume"):
        buffer.load_state_dict({**buffer.state_dict(), **change})
    with pytest.raises(DataError, match=r"sample_offset is 6, .* from 0 to 5"):
        buffer.load_state_dict({**buffer.state_dict(), "sample_offset": 6})


def test_invalid_sources_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        DataBuffer([])
    with pytest.raises(DataError, match="uid 'p0' occurs 2 times"):
        DataBuffer([*prompts(2), *prompts(1)])
    with pytest.raises(ConfigError, match="no sources"):
        MixtureSource([], seed=0)
    with pytest.raises(ConfigError, match=r"positive and finite, got \[1.0, 0.0\]"):
        MixtureSource([(prompts(2), 1.0), (prompts(2, "b"), 0.0)], seed=0)
    with pytest.raises(DataError, match="uid 'p0' occurs in 2 sources"):
        MixtureSource([(prompts(2), 1.0), (prompts(1), 1.0)], seed=0)
    with pytest.raises(ConfigError, match="cannot get -1"):
        DataBuffer(prompts(1)).get_prompts(-1)
