"""Odd values, as Python objects. All are determined by the random number generator."""

from __future__ import annotations

import random
import string
from typing import Any

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**12, -(10**12), 2**31, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
    "", " ", "0", "1", "-1", "nan", "null", "true", "yes", "1e3", "0x10", "1_000", "a", "auto",
    "/", "/proc/self", "/dev/null", "..", "~", "a/b", "C:\\a", "a\nb", "a\tb", "\0", "a\0b",
    "\x1b[2J", "\u202e", "é", "日本語", "😀", "\ud800", "a\udc80b", "{", "}", "[", "]", "{}", "[]",
    "${", "${x}", "${trainer.seed}", "${oc.env:HOME}", "???", "%s", "{0}", "a,b", "a=b", "a:b", "`",
    "'", '"', "$(x)", "*", "&a", "!!int", "#", "@", "|", ">", "-", "1970-01-01", "12:30", "None",
    "9" * 6000, "a" * 5000,
)  # fmt: skip


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """Return an odd scalar, list or mapping; sometimes long, large or nested deeply."""
    kind = draw.random()
    if kind < 0.6 or depth > 3:
        return draw.choice(SCALARS)
    if kind < 0.7:
        return [odd_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 3, 9)))]
    if kind < 0.8:
        return {odd_name(draw): odd_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2)))}
    if kind < 0.85:
        return nested(draw.choice((20, 70, 300)), draw.choice(("list", "mapping")))
    if kind < 0.9:
        return draw.choice((1, -1)) * draw.getrandbits(draw.choice((8, 32, 62, 80, 500, 20000)))
    if kind < 0.95:
        return draw.uniform(-10, 10) * 10.0 ** draw.randint(-300, 300)
    return "".join(draw.choice(string.printable) for _ in range(draw.randint(1, 30)))


def odd_name(draw: random.Random) -> str:
    """Return a name of a key."""
    return str(draw.choice(("a", "b", "x.y", "0", "", " ", "é", "a" * 300, "path", "name", "type")))


def nested(depth: int, kind: str) -> Any:
    """Return `depth` lists or mappings, one inside the other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def as_text(value: Any) -> str:
    """Return a value in the notation of Hydra, JSON and YAML's flow style, without any limit."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python refuses to write an integer of more than 4,300 digits.
        return f"{'-' if value < 0 else ''}{_digits(abs(value))}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _digits(value: int) -> str:
    parts = []
    while value >= 10**1000:
        value, low = divmod(value, 10**1000)
        parts.append(f"{low:01000d}")
    return str(value) + "".join(reversed(parts))
