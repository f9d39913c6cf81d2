"""The refusal of a user's file or value that cannot be read.

Whatever reading a file raises becomes one error of Slipstream. Its message names the file, the
reason and the remedy. All readers of users' files use `reading`, so that none has to list the
exceptions of parsers and libraries. `shown` writes a value into a message, `value_problem` finds
values that no setting or file of Slipstream can hold.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError

MOST_SHOWN = 120
"""A message shows at most this many characters of a value."""

MOST_DEPTH = 64
"""Values may be nested this deep. Python's own limit on recursion is about 1,000 calls, and code
that copies or writes a value needs several calls per level."""

_INT64 = 1 << 63
_MOST_BITS = 14_000
"""Python converts integers of up to 4,300 digits to text, which have at least this many bits."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextlib.contextmanager
def reading(
    what: str | Path, error: type[SlipstreamError], remedy: str, *, noun: str = ""
) -> Iterator[None]:
    """Turn whatever the body raises into `error`: `what: reason; remedy`.

    `what` is the file, with the line or field if it is known. `noun` describes it before its name,
    such as "config file ". Errors of Slipstream pass unchanged, and so do requests to end the
    process. Libraries written in Rust report a bug as a `BaseException`, which is an error, too.
    """
    try:
        yield
    except (SlipstreamError, NameError):
        # A NameError is a mistake in the program. No file causes one.
        raise
    except Exception as caught:
        raise error(f"{noun}{shown_path(what)}: {reason(caught)}; {remedy}") from caught
    except BaseException as caught:
        # Cancellation of a task ends the task; only a panic of a library is an error.
        if isinstance(caught, _ENDS) or type(caught).__name__ != "PanicException":
            raise
        raise error(f"{noun}{shown_path(what)}: {reason(caught)}; {remedy}") from caught


def jinja_text(value: str, *, key: str) -> str:
    """Return the Jinja template that a user gave as text, or as the path of a file.

    A text with `{{` or `{%` is a template; everything else is a path. `key` names the setting.
    Raises ConfigError if there is no such file, or if it has no template.
    """
    if _is_template(value):
        return value
    path = Path(value.strip()).expanduser()
    remedy = f"set {key} to a file such as chat_template.jinja, or to a template with {{{{ }}}}"
    given = f"{key}={shown_path(value, MOST_SHOWN)}"
    with reading(given, ConfigError, remedy):
        if path.is_dir():
            raise ConfigError(f"{given} is a folder; {remedy}")
        if not path.is_file():
            raise ConfigError(f"{given} is neither a Jinja template nor an existing file; {remedy}")
        if path.suffix == ".json":
            raise ConfigError(f"{given} is a JSON file; write its template alone into a file")
        text = path.read_text(encoding="utf-8")
    if not _is_template(text):
        raise ConfigError(f"{given} has no Jinja template (it has neither {{{{ nor {{%); {remedy}")
    return text


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def special_file(folder: Path) -> Path | None:
    """Return a pipe, device or socket directly in `folder`; None if there is none.

    Reading a pipe waits for a writer, and reading a device may never end. Libraries that are given
    a folder open its files without a check.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            return path
    return None


def reason(error: BaseException) -> str:
    """Return in one line why reading failed."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, KeyError) and error.args:
        return f"key {shown(error.args[0])} is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "integer string conversion" in str(error):
        return "an integer has too many digits"
    text = _line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """Return `value` as it appears in a message: one line of at most `most` characters.

    Works for every value: for integers that Python does not convert to text, for values that are
    nested deeply, and for text with lone surrogates.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INT64:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _line(repr(value), most)
    except Exception:  # a value of a user's file or class may fail in any way
        return f"a {type(value).__name__} that cannot be shown"


def shown_path(path: str | Path, most: int = 400) -> str:
    """Return a file name, or another text of the user, as it appears in a message."""
    return _line(str(path), most)


def _line(text: str, most: int = MOST_SHOWN) -> str:
    """Return the first line of `text`, cut in its middle, with characters that can be written."""
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    if len(first) > most:
        half = most // 2
        first = f"{first[:half]}...{first[-half:]} ({len(first)} characters)"
    if _SURROGATE.search(first) or "\0" in first:
        first = first.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return first


def value_problem(value: Any, *, setting: bool = False, depth: int = 0) -> str | None:
    """Return why no setting and no row of data can hold `value`; None if they can.

    Integers must be writable as text, and those of a `setting` must fit in 64 bits, since torch has
    no larger ones. Text must be writable as UTF-8, and the text of a `setting` must not have NUL,
    which no file name can have. Nesting is limited to `MOST_DEPTH` levels.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if setting:
            fits = -_INT64 <= value < _INT64
            return None if fits else f"{shown(value)} does not fit in 64 bits"
        return f"{shown(value)} is too large" if value.bit_length() > _MOST_BITS else None
    if isinstance(value, str):
        if _SURROGATE.search(value):
            return f"{shown(value)} has a lone surrogate, which cannot be written as UTF-8"
        return f"{shown(value)} has a NUL character" if setting and "\0" in value else None
    if not isinstance(value, Mapping | list | tuple):
        return None
    if depth >= MOST_DEPTH:
        return f"it is nested deeper than {MOST_DEPTH} levels"
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    found = (value_problem(part, setting=setting, depth=depth + 1) for part in parts)
    return next((problem for problem in found if problem is not None), None)
