"""Results of a program arrive at the judge as values that equal literals as they do in Python."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import io
import json
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.rewards.scorers.remote_objects import Peer, Remote

Point = collections.namedtuple("Point", "x y")
Color = enum.IntEnum("Color", "red green")


def arrived(value: Any) -> Any:
    """Return a value as the other process gets it."""
    here, there = (Peer(io.StringIO(), lambda line: None) for _ in range(2))
    return there.decode(json.loads(json.dumps(here.encode(value))))


@pytest.mark.parametrize(
    ("result", "literal"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (Counter("aab"), Counter("aba")),
        (OrderedDict(a=1, b=2), {"b": 2, "a": 1}),
        (OrderedDict(a=1, b=2), OrderedDict(a=1, b=2)),
        (defaultdict(int, x=1), {"x": 1}),
        (defaultdict(Counter, a=Counter("aa")), {"a": {"a": 2}}),
        (Point(1, 2), (1, 2)),
        ({Point(1, 2): [Point(3, 4)]}, {(1, 2): [(3, 4)]}),
        (frozenset([1]), {1}),
        ({frozenset([1])}, {frozenset([1])}),
        (fractions.Fraction(1, 2), 0.5),
        (decimal.Decimal("1.10"), decimal.Decimal("1.1")),
        (decimal.Decimal("0.5"), 0.5),
        ({"a": 1}.keys(), {"a"}),
        ({"a": [1]}.items(), {"a": [1]}.items()),
        ({"a": 1}.items(), {("a", 1)}),
        (collections.deque([1, 2]), collections.deque([1, 2])),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
        (UserDict(a=1), {"a": 1}),
        (UserList([1]), [1]),
        (UserString("ab"), "ab"),
        (Color.green, 2),
        (True, 1),
        (1.0, 1),
        (-0.0, 0),
        (10**30, 10**30),
        (1e999, float("inf")),
        (1 + 2j, 1 + 2j),
        (bytearray(b"a"), b"a"),
        (range(3), range(3)),
        (datetime.timedelta(days=1), datetime.timedelta(hours=24)),
        (datetime.time(1, 2), datetime.time(1, 2)),
        (datetime.date(2020, 1, 2), datetime.date(2020, 1, 2)),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ((1, [2, {3: (4,)}]), (1, [2, {3: (4,)}])),
    ],
)
def test_results_equal_literals(result: Any, literal: Any) -> None:
    assert arrived(result) == literal


@pytest.mark.parametrize(
    ("result", "literal"),
    [
        (Counter("ab"), {"a": 2, "b": 1}),
        (Counter(a=0), {}),
        (OrderedDict(b=2, a=1), OrderedDict(a=1, b=2)),
        (defaultdict(int), {"x": 0}),
        (Point(1, 2), (2, 1)),
        (Point(1, 2), [1, 2]),
        ((1, 2), [1, 2]),
        ({1, 2}, [1, 2]),
        (frozenset([2]), {1}),
        (fractions.Fraction(1, 3), 0.3333),
        (decimal.Decimal("0.5"), 0.51),
        ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.values(), [1]),
        ({"a": 1}.items(), [("a", 1)]),
        (collections.deque([1]), [1]),
        (UserList([2]), [1]),
        (array.array("i", [1]), [1]),
        (iter([1]), [1]),
        (range(3), [0, 1, 2]),
        (float("nan"), float("nan")),
        (0.1 + 0.2, 0.3),
        (None, 0),
        (2, True),
        ("1", 1),
        ("a", b"a"),
    ],
)
def test_results_differ_from_other_literals(result: Any, literal: Any) -> None:
    assert result != literal or result is literal
    assert arrived(result) != literal


def test_types_of_collections_keep_their_methods() -> None:
    assert arrived(Counter("aab")).most_common(1) == [("a", 2)]
    assert arrived(Counter("aab"))["z"] == 0
    assert arrived(defaultdict(list))["x"] == []
    assert arrived(defaultdict(lambda: 7, x=1)).default_factory is None
    assert list(arrived({"b": 1, "a": 2}.values())) == [1, 2]
    point = arrived(Point(1, 2))
    assert (point.x, point.y, str(point)) == (1, 2, "Point(x=1, y=2)")


class Yes:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def subclass(base: type, *arguments: Any, **more: Any) -> Any:
    """Return an object of a subclass that claims to equal everything."""
    methods = {"__eq__": lambda self, other: True, "__hash__": lambda self: 0}
    return type("Claims", (base,), methods)(*arguments, **more)


@pytest.mark.parametrize(
    "make",
    [
        Yes,
        lambda: subclass(Counter, a=1),
        lambda: subclass(OrderedDict, a=1),
        lambda: subclass(defaultdict, int, a=1),
        lambda: subclass(Point, 1, 2),
        lambda: subclass(UserDict, a=1),
        lambda: subclass(UserList, [1]),
        lambda: subclass(datetime.timedelta, 1),
        lambda: [Yes()],
        lambda: defaultdict(Yes, a=Yes()),
        lambda: Point(Yes(), Yes()),
    ],
)
def test_no_result_brings_its_own_equality(make: Callable[[], Any]) -> None:
    result = arrived(make())
    for literal in (50, True, "50", [50], {"a": 50}, (50, 50), None):
        assert result != literal


def test_names_of_fields_cannot_replace_methods() -> None:
    class Claims(tuple[Any, ...]):
        _fields = ("__eq__", "__class__", "x) or print(1) #")

    result = arrived(Claims((1, 2, 3)))
    assert result._fields == ("_0", "_1", "_2")
    assert result == (1, 2, 3)
    assert result != (1, 2, 50)
    Claims.__name__ = "x) or print(1) #"
    assert type(arrived(Claims((1, 2, 3)))) is tuple


def test_other_objects_are_references() -> None:
    assert isinstance(arrived(object()), Remote)
    assert arrived(object()) != arrived(object())
