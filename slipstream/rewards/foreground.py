"""`slipstream reward`: calls a reward function on the responses of a dump, one at a time.

Calls it in the main thread and without a deadline, so that a debugger can stop in it. Knows dump
files (one JSON object per line, with verl's names), not runs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from slipstream.errors import ConfigError, DataError, RewardError
from slipstream.reading import reading
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.protocol import Score
from slipstream.rewards.results import Reader
from slipstream.rewards.signatures import signature_of
from slipstream.rewards.trl import logs_of
from slipstream.types import Sample, Segment, Status

_SHOWN = 5
"""Maximum number of failures, and of differing scores, that are printed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One response of a dump. `text` is passed to the reward function.

    `recorded` is the score in the dump, None if it has none.
    """

    number: int
    sample: Sample
    text: str
    recorded: float | None


@dataclass(frozen=True, slots=True)
class Scored:
    """A line, its score, and the duration of the call in seconds."""

    line: Line
    score: Score
    seconds: float


def read_dump(path: Path, data_source: str | None = None) -> Iterator[Line]:
    """Yield the responses of a dump file, written by a run (`trainer.rollout_data_dir`) or by verl.

    `data_source` overrides the data source of the lines. Raises DataError that names the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _line(path, number, text, data_source)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the dump {path} cannot be read: {error}") from error


def _line(path: Path, number: int, text: str, data_source: str | None) -> Line:
    where = f"{path}, line {number}"
    with reading(where, DataError, "give a dump of responses"):
        return _read(where, number, json.loads(text), data_source)


def _read(where: str, number: int, row: Any, data_source: str | None) -> Line:
    if not isinstance(row, dict) or not isinstance(row.get("output"), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no text in `output` ({found}); give a dump of responses")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise DataError(f"{where}: extra_info is {type(extra).__name__}, not a mapping")
    response = str(row["output"] if row.get("text") is None else row["text"])
    sample = Sample(
        prompt=row.get("messages") or row.get("input") or "",
        segments=[
            Segment.given("prompt", row.get("prompt_ids") or []),
            Segment.given("assistant", row.get("response_ids") or []),
        ],
        response=response,
        status=Status.COMPLETED,
        uid=str(row.get("uid", number)),
        data_source=str(data_source or row.get("data_source") or ""),
        ground_truth=row.get("gts"),
        extra_info=extra,
    )
    recorded = row.get("score")
    return Line(number, sample, response, None if recorded is None else float(recorded))


def score_line(function: Callable[..., Any], line: Line, *, reraise: bool = False) -> Scored:
    """Call a reward function as a manager would, and return the score.

    An exception of the function becomes a failure, or with `reraise` is raised. A RewardError is
    always raised.
    """
    signature = signature_of(function)
    arguments = signature.arguments([line.sample], [line.text])
    began = time.perf_counter()
    raised: list[BaseException] = []

    def call() -> Any:
        try:
            returned = function(**arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
        except BaseException as error:
            raised.append(error)
            raise
        return returned

    outcome = Reader(signature, 1, logs_of(arguments)).outcome(call)
    if reraise and raised:
        raise raised[0]
    (read,) = outcome.each(1)
    seconds = time.perf_counter() - began
    score = Score(0.0, ok=False, failure=read) if isinstance(read, str) else read
    return Scored(line, score, seconds)


async def _awaited(value: Any) -> Any:
    return await value


def load_function(fn: str | None, kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the function named by `FILE.py` (its `compute_score`) or `FILE.py:NAME`.

    None is the built-in function, which chooses by data source.
    """
    if fn is None:
        if kwargs:
            raise ConfigError("--kwargs needs a function of your own; add --fn FILE.py[:NAME]")
        return default_compute_score
    path, colon, name = fn.rpartition(":")
    if not colon or name.endswith(".py"):
        path, name = fn, "compute_score"
    return get_custom_reward_fn(path, name, kwargs)


def main(
    dump: Path,
    fn: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    data_source: str | None = None,
    limit: int | None = None,
    output: Path | None = None,
    reraise: bool = False,
    out: TextIO | None = None,
) -> int:
    """Score a dump and print a summary. With `output`, write one JSON line per response to it.

    Returns 0, or the exit code of `RewardError` if scoring failed for a response.
    """
    function = load_function(fn, kwargs)
    stream = out or sys.stdout
    scored: list[Scored] = []
    for line in read_dump(dump, data_source):
        if limit is not None and len(scored) == limit:
            break
        scored.append(score_line(function, line, reraise=reraise))
    if not scored:
        raise DataError(f"the dump {dump} has no responses")
    if output is not None:
        _write(output, scored)
    print(_report(_name(function), scored), file=stream)
    failed = any(s.score.failure is not None for s in scored)
    return RewardError.exit_code if failed else 0


def _report(name: str, scored: list[Scored]) -> str:
    good = [s for s in scored if s.score.failure is None]
    bad = [s for s in scored if s.score.failure is not None]
    lines = [f"{name}: {len(scored):,} responses, {len(bad):,} failed"]
    if good:
        values = [s.score.value for s in good]
        lines.append(
            f"  score          mean {statistics.fmean(values):.4f}, min {min(values):g}, max "
            f"{max(values):g}"
        )
        parts = {key: None for s in good for key in s.score.parts}
        for key in parts:
            of = [s.score.parts[key] for s in good if key in s.score.parts]
            lines.append(f"  {key:<14} mean {statistics.fmean(of):.4f} of {len(of):,}")
    seconds = [s.seconds for s in scored]
    lines.append(
        f"  time           {1e3 * statistics.median(seconds):.3f} ms per response (median), "
        f"max {1e3 * max(seconds):.3f} ms, {len(seconds) / max(sum(seconds), 1e-9):,.0f} per second"
    )
    reasons = Counter(str(s.score.failure) for s in bad)
    for reason, count in reasons.most_common(_SHOWN):
        first = next(s for s in bad if s.score.failure == reason)
        lines.append(f"  failed {count:,}x: {reason} (first in line {first.line.number})")
    if len(reasons) > _SHOWN:
        lines.append(f"  and for {len(reasons) - _SHOWN} more reasons")
    compared = [s for s in good if s.line.recorded is not None]
    other = [s for s in compared if s.score.value != s.line.recorded]
    if compared:
        lines.append(f"  as in the dump {len(compared) - len(other):,} of {len(compared):,}")
    lines += [
        f"  line {s.line.number}: {s.score.value:g}, in the dump {s.line.recorded:g}"
        for s in other[:_SHOWN]
    ]
    return "\n".join(lines)


def _write(path: Path, scored: list[Scored]) -> None:
    rows = [
        {
            "line": s.line.number,
            "uid": s.line.sample.uid,
            "score": None if s.score.failure is not None else s.score.value,
            "failure": s.score.failure,
            "seconds": s.seconds,
            **({"parts": s.score.parts} if s.score.parts else {}),
        }
        for s in scored
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))
