"""Runs many odd inputs, each with a deadline, and collects those with a wrong outcome.

An input has a right outcome if it is accepted, or if it is refused with an error of Slipstream
whose text names what is wrong. A traceback is a wrong outcome, and so is an input without an end.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from slipstream.errors import SlipstreamError

LONG = os.environ.get("SLIPSTREAM_FUZZ") == "long"
"""Whether the tests run the long form of each fuzz."""

DEADLINE_S = 60
"""An input that takes longer counts as endless. Ordinary inputs take less than a second."""


class EndlessError(BaseException):
    """An input ran past its deadline. No handler of exceptions catches it."""


@dataclass(slots=True)
class Result:
    """How many inputs had which outcome, and a line for each wrong one."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def deadline(seconds: int = DEADLINE_S) -> Iterator[None]:
    """Raise EndlessError in the body after `seconds`.

    If the body never returns to Python, the process ends with the tracebacks of its threads.
    """

    def late(signum: int, frame: FrameType | None) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(4 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_input(
    result: Result, name: str, attempt: Callable[[], str], *named: str, never_right: bool = False
) -> None:
    """Run `attempt`, and record its outcome.

    It returns the text of a refusal, or "" if it accepts the input; it may also raise the refusal.
    The text must have one of `named`. An input that is `never_right` must not be accepted.
    """
    try:
        with deadline():
            text = attempt()
    except SlipstreamError as error:
        text = str(error)
    except EndlessError:
        result.outcomes["endless"] += 1
        result.wrong.append(f"{name}: no end")
        return
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result.outcomes["traceback"] += 1
        result.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]!a}")
        return
    if not text:
        result.outcomes["accepted"] += 1
        if never_right:
            result.wrong.append(f"{name}: accepted")
    elif named and not any(part in text for part in named):
        result.outcomes["unnamed"] += 1
        result.wrong.append(f"{name}: the text does not name {named}: {text[:300]!a}")
    elif len(text) > 20_000:
        result.outcomes["too long"] += 1
        result.wrong.append(f"{name}: a text of {len(text)} characters: {text[:100]!a}")
    else:
        result.outcomes["refused"] += 1


def command(name: str, count: int, run: Callable[[int], Result]) -> int:
    """Parse `--count N`, run the fuzz and print its counts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Run the fuzz of {name}.")
    parser.add_argument("--count", type=int, default=count, help=f"inputs (default: {count})")
    result = run(parser.parse_args().count)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in result.outcomes.most_common())
    print(f"{name}: {sum(result.outcomes.values())} inputs: {counts}")
    for line in result.wrong:
        print(f"  {line}")
    sys.stdout.flush()
    return 1 if result.wrong else 0
