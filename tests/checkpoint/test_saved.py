"""Values of a saved state: those of the expected kind are returned, all others are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoint.saved import (
    MOST,
    Saved,
    check_finite,
    drawn_from,
    is_finite,
    is_same,
    restoring,
)
from slipstream.errors import CheckpointError, DataError
from slipstream.types import Segment, Status, VersionSpan


def refused(act: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    return str(caught.value)


def test_fields_are_complete_and_known() -> None:
    saved = Saved({"a": 1, "b": {"c": 2}}, "state")
    assert saved.fields("a", "b")["a"].count() == 1
    assert saved.fields("a", optional=("b", "d")).keys() == {"a", "b"}
    assert "'state.d' is missing" in refused(lambda: saved.fields("a", "b", "d"))
    assert "'state.b' is unknown (known: a)" in refused(lambda: saved.fields("a"))
    inner = saved.field("b").field("c")
    assert (inner.place, inner.count()) == ("state.b.c", 2)
    assert "state.b.c is 2, not a list" in refused(inner.elements)
    assert "a name in state is 5, not text" in refused(lambda: Saved({5: 1}, "state").fields("a"))


@pytest.mark.parametrize("odd", [-1, 4, 1.0, "1", True, None, [], 10**400, float("nan")])
def test_counts_are_whole_numbers_in_their_range(odd: object) -> None:
    assert Saved(3, "n").count(3) == 3
    message = refused(lambda: Saved(odd, "n").count(3))
    assert message.startswith("n is ")
    assert message.endswith("not a whole number from 0 to 3; resume from another checkpoint")
    assert len(message) < 200


@pytest.mark.parametrize("odd", [-1, 2.5, float("nan"), float("inf"), "1", True, None, 10**400])
def test_numbers_are_finite_and_in_their_range(odd: object) -> None:
    assert Saved(1, "x").number(0.0, 2.0) == 1.0
    assert "x is " in refused(lambda: Saved(odd, "x").number(0.0, 2.0))


def test_texts_and_lists() -> None:
    assert Saved("é", "t").text() == "é"
    odds: tuple[object, ...] = (5, None, [], "a\ud800")
    for odd in odds:
        assert "t is " in refused(lambda odd=odd: Saved(odd, "t").text())
    assert [part.value for part in Saved([1, 2], "l").elements(2)] == [1, 2]
    assert "l has 1 elements, not 2" in refused(lambda: Saved([1], "l").elements(2))
    assert "l[1] is 'a'" in refused(lambda: Saved([1, "a"], "l").elements()[1].count())


def test_tensors_have_the_form_of_others_and_are_finite() -> None:
    like = torch.ones(2, 3)
    assert Saved(torch.zeros(2, 3), "w").tensor(like).sum() == 0
    for odd in (torch.zeros(3, 2), torch.zeros(2, 3).double(), torch.zeros(6), 5, None, [1.0]):
        message = refused(lambda odd=odd: Saved(odd, "w").tensor(like))
        assert "not a tensor float32 (2, 3)" in message
    for value in (float("nan"), float("inf")):
        odd = torch.full((2, 3), value)
        assert "w has NaN or infinite" in refused(lambda odd=odd: Saved(odd, "w").tensor(like))
    found = Saved({"a": like}, "w")
    assert found.tensors({"a": like}).keys() == {"a"}
    assert "'w.b' is missing" in refused(lambda: found.tensors({"a": like, "b": like}))


def test_finite_tensors_of_all_dtypes() -> None:
    assert is_finite(torch.full((4,), 3e38))  # the sum of such numbers in fp32 would overflow
    assert is_finite(torch.full((4,), 1e308, dtype=torch.float64))
    assert is_finite(torch.tensor([1, 2]))
    assert not is_finite(torch.tensor([1.0, float("nan")], dtype=torch.bfloat16))
    assert is_finite(torch.zeros(0))
    check_finite([("a", torch.ones(2))])
    assert "weight b has NaN" in refused(
        lambda: check_finite([("b", torch.tensor([float("nan")]))])
    )


@dataclass(kw_only=True)
class Part:
    number: int
    words: list[str]
    share: float | None
    status: Status
    span: VersionSpan
    table: dict[str, float]
    anything: Any
    passing: list[int] = field(default_factory=list, compare=False)


PART = {
    "number": 3,
    "words": ["a"],
    "share": None,
    "status": "pending",
    "span": {"version": 1, "start": 0, "end": 2},
    "table": {"x": 1},
    "anything": [None, {}],
}


def test_data_classes_are_read_by_their_hints() -> None:
    found = Saved(PART, "part").of(Part)
    assert found == Part(
        number=3,
        words=["a"],
        share=None,
        status=Status.PENDING,
        span=VersionSpan(1, 0, 2),
        table={"x": 1.0},
        anything=[None, {}],
    )


@pytest.mark.parametrize(
    ("key", "odd", "place"),
    [
        ("number", 1.5, "part.number"),
        ("number", True, "part.number"),
        ("words", "ab", "part.words"),
        ("words", ["a", 5], "part.words[1]"),
        ("share", "x", "part.share"),
        ("status", "asleep", "part.status"),
        ("status", [], "part.status"),
        ("span", {"version": 1, "start": 0}, "part.span.end"),
        ("span", None, "part.span"),
        ("table", {"x": "1"}, "part.table.x"),
        ("passing", [1, "2"], "part.passing[1]"),
        ("more", 1, "part.more"),
    ],
)
def test_odd_values_of_data_classes_name_their_place(key: str, odd: object, place: str) -> None:
    message = refused(lambda: Saved({**PART, key: odd}, "part").of(Part))
    assert place in message
    assert "resume from another checkpoint" in message


def test_missing_fields_and_contradicting_lists_are_refused() -> None:
    short = {key: value for key, value in PART.items() if key != "table"}
    assert "'part.table' is missing" in refused(lambda: Saved(short, "part").of(Part))
    segment = {"role": "a", "ids": [1], "loss_mask": [], "log_probs": [0.0],
               "sampling_log_probs": [0.0], "spans": []}  # fmt: skip
    assert refused(lambda: Saved(segment, "s").of(Segment)).startswith("s: ValueError: segment")


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        (list[int], [1, 2.0]),
        (list[int], [1, MOST + 1]),
        (list[int], [1, None]),
        (list[float], [1.0, float("nan")]),
        (list[float], [1.0, float("inf")]),
        (list[float], [1.0, True]),
    ],
)
def test_long_lists_of_numbers_are_checked_too(kind: Any, odd: list[Any]) -> None:
    assert Saved([1, 2], "l").of(kind) == [1, 2]
    assert "l[1] is " in refused(lambda: Saved(odd, "l").of(kind))


def test_restoring_names_the_part_and_keeps_the_type_of_the_error(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    with (
        pytest.raises(DataError, match=r"data\.json: sources\[1\]: no"),
        restoring(file),
        restoring("sources[1]"),
    ):
        raise DataError("no")
    absent: dict[str, int] = {}
    with (
        pytest.raises(CheckpointError, match=r"data\.json: key 'a' is missing; resume"),
        restoring(file),
    ):
        absent["a"]
    with pytest.raises(CheckpointError, match=r"^.*data\.json is corrupt$"), restoring(file):
        raise CheckpointError(f"{file} is corrupt")


def test_same_values_also_have_the_same_type() -> None:
    assert is_same({"a": [1, (2.0,)]}, {"a": [1, [2.0]]})
    for one, other in ((1, 1.0), (1, True), ({"a": 1}, {"a": 1, "b": 2}), ([1], [1, 2])):
        assert not is_same(one, other)


def test_what_was_drawn_is_known_only_from_a_count() -> None:
    class Source:
        drawn: object = 4

    assert drawn_from(Source()) == 4
    Source.drawn = {"a": 1}
    assert drawn_from(Source()) is None
    assert drawn_from(object()) is None
