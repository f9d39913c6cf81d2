"""Calls between a program and the judge that tests it, in two processes.

This file is sent into the sandbox as text, so it imports only the standard library. The program's
process serves its names; the judge's process evaluates the tests. Messages are lines of JSON. Only
plain values travel: numbers, texts, lists, dictionaries and the like, also those of `collections`.
They arrive as the judge's own types. Any other object stays where it is and travels as a reference.
So a result cannot bring its own `__eq__` to the judge.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import datetime
import decimal
import fractions
import json
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

_SAFE_INT = 2**53
_SHOWN = 300


class ProgramEnded(BaseException):
    """The other process has ended. Tests cannot catch it as an Exception."""


class RemoteError(Exception):
    """An exception of the program whose type the judge does not know."""


class Remote:
    """An object in the other process.

    It can be called, iterated and indexed, and its attributes can be read. The results are plain
    values or further references. A reference equals only itself and has no truth value, because the
    other process could answer every comparison with yes.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self._number, args=args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attribute", self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("attributes of the program's objects cannot be set by a test")

    def __iter__(self) -> Any:
        return RemoteIterator(self._peer, self._peer.ask("iter", self._number)._number)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self._number, args=(key,))

    def __len__(self) -> Any:
        return self._peer.ask("len", self._number)

    def __str__(self) -> Any:
        return self._peer.ask("str", self._number)

    def __bool__(self) -> bool:
        raise TypeError("an object of the program has no truth value")

    __contains__ = None


class RemoteIterator(Remote):
    """An iterator in the other process."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self._peer.ask("next", self._number)
        except RemoteError as error:
            if str(error).startswith("StopIteration"):
                raise StopIteration from None
            raise


class Peer:
    """One side of the conversation. `lines` are the messages of the other side.

    `space` are the names that the other side may use. Without it, the other side may only call the
    functions that were passed to it.
    """

    def __init__(
        self, lines: TextIO, write: Callable[[str], None], space: dict[str, Any] | None = None
    ) -> None:
        self._lines, self._write, self._space = lines, write, space
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def ask(
        self,
        what: str,
        on: int | None = None,
        *,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send a request and return its result. Answers requests of the other side meanwhile."""
        message: dict[str, Any] = {"ask": what, "on": on, "name": name}
        message["args"] = [self.encode(value) for value in args]
        message["kwargs"] = {key: self.encode(value) for key, value in (kwargs or {}).items()}
        self.send(message)
        while True:
            reply = self._receive()
            if "ask" in reply:
                self.answer(reply)
                continue
            if "error" in reply:
                raise _error(*reply["error"])
            for given, after in zip(args, reply.get("after") or ()):  # noqa: B905 - for Python 3.9
                _copy_back(given, self.decode(after))
            return self.decode(reply["value"])

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            try:
                request = self._receive()
            except ProgramEnded:
                return
            self.answer(request)

    def answer(self, request: Mapping[str, Any]) -> None:
        """Execute one request of the other side and send its result."""
        try:
            args = [self.decode(value) for value in request["args"]]
            kwargs = {key: self.decode(value) for key, value in request["kwargs"].items()}
            value = self._executed(request, args, kwargs)
            reply = {"value": self.encode(value)}
            if value is None and request["ask"] == "call":
                # A function that returns nothing may have changed its arguments.
                reply["after"] = [self.encode(arg) for arg in args]
            text = json.dumps(reply)
        except ProgramEnded:
            raise
        except BaseException as error:
            text = json.dumps({"error": [type(error).__name__, _text(error)]})
        self._write(text)

    def _executed(self, request: Mapping[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        what, on = request["ask"], request["on"]
        if what == "get" and self._space is not None:
            return self._space[request["name"]]
        if self._space is None and what != "call":
            raise PermissionError(what)
        thing = self._objects[on]
        if what == "call":
            return thing(*args, **kwargs)
        if what == "attribute":
            return getattr(thing, request["name"])
        if what == "item":
            return thing[args[0]]
        operations: dict[str, Callable[[Any], Any]] = {
            "iter": iter,
            "next": next,
            "len": len,
            "str": str,
        }
        return operations[what](thing)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self._write(json.dumps(message))

    def _receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ProgramEnded
        message: dict[str, Any] = json.loads(line)
        return message

    def encode(self, value: Any) -> Any:
        """Return a value as JSON. Subclasses of plain types become the plain type.

        The types of `collections` and named tuples keep their type.
        """
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is list:
            return [self.encode(part) for part in value]
        if isinstance(value, Remote):
            return {"t": "yours", "v": value._number}
        if isinstance(value, int):
            value = int(value)
            small = -_SAFE_INT < value < _SAFE_INT
            return value if small else {"t": "int", "v": hex(value)}
        if isinstance(value, float):
            value = float(value)
            return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
        if isinstance(value, str):
            return "".join(value)
        if isinstance(value, collections.UserString):
            return self.encode(value.data)
        if isinstance(value, tuple) and (named := _fields(value)) is not None:
            return {"t": "named", "v": self.encode(named)}
        for base, tag, parts in _ENCODERS:
            if isinstance(value, base):
                return {"t": tag, "v": self.encode(parts(value))}
        if hasattr(value, "dtype") and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        name: Any = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"t": "builtin", "v": name}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"t": "mine", "v": number}

    def decode(self, value: Any) -> Any:
        """Return the value of JSON from `encode` of the other side."""
        if isinstance(value, list):
            return [self.decode(part) for part in value]
        if not isinstance(value, dict):
            return value
        tag, inner = value["t"], value["v"]
        if tag == "mine":
            return Remote(self, int(inner))
        if tag == "yours":
            return self._objects[int(inner)]
        if tag == "builtin":
            return getattr(builtins, inner)
        if tag == "int":
            return int(inner, 16)
        return _DECODERS[tag](self.decode(inner))


def _pairs(value: Any) -> list[list[Any]]:
    return [[key, value[key]] for key in list(value)]


def _fields(value: Any) -> list[Any] | None:
    """Return type name, field names and values of a named tuple; None for another tuple."""
    names = getattr(type(value), "_fields", None)
    if not isinstance(names, tuple) or len(names) != len(value):
        return None
    return [type(value).__name__, [str(name) for name in names], list(value)]


def _named(parts: list[Any]) -> tuple[Any, ...]:
    """Return a named tuple of the judge. Names that could replace a method become `_0`, `_1`..."""
    name, fields, values = parts
    if not isinstance(name, str) or not name.isidentifier() or len(fields) != len(values):
        return tuple(values)
    made: Any = collections.namedtuple("_" + name, fields, rename=True)  # type: ignore[misc]
    made.__name__ = name
    result: tuple[Any, ...] = made(*values)
    return result


_FACTORIES = (int, float, complex, str, bool, list, dict, set, tuple)


def _factory(value: Any) -> str | None:
    """Return the name of a default dictionary's factory, if that is a plain type."""
    made = value.default_factory
    return next((kind.__name__ for kind in _FACTORIES if made is kind), None)


def _default(parts: list[Any]) -> Any:
    factory, pairs = parts
    known = next((kind for kind in _FACTORIES if kind.__name__ == factory), None)
    return collections.defaultdict(known, pairs)


_ENCODERS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (tuple, "tuple", list),
    (list, "list", list),
    (collections.UserList, "list", list),
    (collections.deque, "deque", list),
    (frozenset, "frozenset", list),
    (set, "set", list),
    (collections.abc.KeysView, "keys", list),
    (collections.abc.ItemsView, "items", list),
    (collections.abc.ValuesView, "values", list),
    (collections.Counter, "counter", _pairs),
    (collections.OrderedDict, "ordered", _pairs),
    (collections.defaultdict, "default", lambda value: [_factory(value), _pairs(value)]),
    ((dict, types.MappingProxyType, collections.ChainMap, collections.UserDict), "dict", _pairs),
    ((bytes, bytearray), "bytes", lambda value: bytes(value).decode("latin-1")),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (range, "range", lambda value: [value.start, value.stop, value.step]),
    (fractions.Fraction, "fraction", lambda value: [value.numerator, value.denominator]),
    (decimal.Decimal, "decimal", str),
    (datetime.datetime, "datetime", lambda value: value.isoformat()),
    (datetime.date, "date", lambda value: value.isoformat()),
    (datetime.time, "time", lambda value: value.isoformat()),
    (datetime.timedelta, "delta", lambda value: [value.days, value.seconds, value.microseconds]),
]

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "tuple": tuple,
    "list": list,
    "deque": collections.deque,
    "frozenset": frozenset,
    "set": set,
    "keys": lambda keys: dict.fromkeys(keys).keys(),
    "items": lambda pairs: dict(pairs).items(),
    "values": lambda values: dict(enumerate(values)).values(),
    "counter": lambda pairs: collections.Counter(dict(pairs)),
    "ordered": collections.OrderedDict,
    "default": _default,
    "dict": dict,
    "named": _named,
    "bytes": lambda text: text.encode("latin-1"),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: fractions.Fraction(*parts),
    "decimal": decimal.Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "delta": lambda parts: datetime.timedelta(*parts),
}


def _copy_back(given: Any, after: Any) -> None:
    """Change a list, dictionary or set to its value after a call."""
    if type(given) is not type(after):
        return
    if isinstance(given, list):
        if len(given) == len(after):
            for place, part in enumerate(after):
                if isinstance(given[place], (list, dict, set)):
                    _copy_back(given[place], part)
                else:
                    given[place] = part
        else:
            given[:] = after
    elif isinstance(given, collections.deque):
        given.clear()
        given.extend(after)
    elif isinstance(given, (dict, set)):
        given.clear()
        given.update(after)


def _error(name: str, text: str) -> Exception:
    """Return the program's exception, if its type is a built-in one that tests may expect."""
    kind: Any = getattr(builtins, str(name), None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration
    try:
        error: Exception = kind(text) if known else RemoteError(f"{name}: {text}")
        return error
    except Exception:
        return RemoteError(f"{name}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_SHOWN]
    except Exception:
        return ""


class Names(dict):  # type: ignore[type-arg]
    """The global names of a test: its own, and those of the program.

    `served` are the names that belong to the program although the judge has one of that name too.
    """

    def __init__(self, peer: Peer, own: dict[str, Any], served: Sequence[str]) -> None:
        super().__init__(own)
        self._peer = peer
        for name in served:
            self[name] = peer.ask("get", name=name)

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            value = self[name] = self._peer.ask("get", name=name)
        except KeyError:
            raise KeyError(name) from None
        return value


def judge(peer: Peer, tests: Sequence[tuple[str, Sequence[str]]], imports: str) -> None:
    """Evaluate tests, given as [text, names that belong to the program], and send verdicts.

    Ends early if the program has ended.
    """
    for place, (text, served) in enumerate(tests):
        held, why, ended = False, "", False
        try:
            own: dict[str, Any] = {"__name__": "__test__"}
            exec(imports, own)
            exec(compile(text, "test.py", "exec"), Names(peer, own, served))
            held = True
        except ProgramEnded:
            why, ended = "the program ended", True
        except BaseException as error:
            why = f"{type(error).__name__}: {_text(error)}"
        peer.send({"verdict": place, "held": held, "why": why[:_SHOWN], "ended": ended})
        if ended:
            return


def streams() -> tuple[TextIO, Callable[[str], None]]:
    """Return input lines and a function that writes lines. Prints go to standard error."""
    import os

    lines = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)

    def write(text: str) -> None:
        out.write(text + "\n")
        out.flush()

    return lines, write
