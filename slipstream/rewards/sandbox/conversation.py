"""Programs that are tested by a judge, which runs in a sandbox of its own.

Each of the two reads the lines that the other writes. A line of the judge that begins with
`VERDICT` is the verdict of a test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from slipstream.rewards.sandbox.protocol import (
    Program,
    ProgramLimits,
    ProgramResult,
    SandboxError,
)

VERDICT = '{"verdict"'
"""Begin of a line of the judge that is a verdict: a mapping with `held`, `why` and `ended`."""

_MAX_ROUNDS = 200

Hold = Callable[[Program], Iterator[ProgramResult]]
"""Starts the program and a judge, and yields one result per verdict. If it ends early, the last
result says why."""


def conversations(
    hold: Hold, judge_from: Callable[[int], Program], count: int, limits: ProgramLimits
) -> Iterator[ProgramResult]:
    """Yield the results of `count` tests, or fewer if the total time is up.

    `judge_from(n)` is the judge of the tests from number n on. If the program ends or reaches a
    limit in a test, a new program and a new judge continue with the next test.
    """
    done, spent = 0, 0.0
    while done < count and spent < limits.total_timeout_s:
        before = done
        for result in islice(hold(judge_from(done)), count - done):
            done += 1
            spent += result.seconds
            yield result
        if done == before:
            raise SandboxError("the judge of the tests ended without a verdict")


def replayed(
    run: Callable[[Program, str], ProgramResult],
    program: Program,
    judge: Program,
    *,
    total_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ProgramResult]:
    """Hold a conversation in a sandbox that can only run a program on a whole input.

    Program and judge are run again for each call, with all lines so far. So the program must be
    deterministic. If the calls are too many, or their time is up, the results so far follow, and a
    test without any result fails with verdict "time". The seconds are those of the clock. Yields
    nothing if the judge ends without a verdict before the program has written anything.
    """
    began = clock()

    def timed(results: Sequence[ProgramResult]) -> Iterator[ProgramResult]:
        yield from results[:-1]
        yield from (replace(last, seconds=clock() - began) for last in results[-1:])

    to_program, to_judge = "", ""
    for _ in range(_MAX_ROUNDS):
        judged = run(judge, to_judge)
        verdicts, calls = _parted(judged.stdout)
        # At the end of its input, the judge gives a verdict on the test that still waits.
        so_far = [ProgramResult("ok", line) for line in verdicts if not json.loads(line)["ended"]]
        if calls == to_program:
            results = [ProgramResult("ok", line) for line in verdicts]
            if not results and to_judge:
                # The program's output has stopped the judge.
                results = [_ended(judged, "the judge of the tests ended early")]
            yield from timed(results)
            return
        if clock() - began >= total_timeout_s:
            break
        ran = run(program, calls)
        if ran.stdout == to_judge:
            # No reply to the new call: the program ended or reached a limit.
            yield from timed([*so_far, _ended(ran, ran.stderr)])
            return
        to_program, to_judge = calls, ran.stdout
    why = (
        f"the test calls the program more than {_MAX_ROUNDS} times or too slowly, and a service "
        "runs the program again for each call; to run programs on this machine, unset "
        "reward_model.sandbox_fusion.url"
    )
    yield from timed(so_far or [ProgramResult("time", stderr=why)])


def _ended(ran: ProgramResult, why: str) -> ProgramResult:
    """Return the result of a test in which a run ended too early."""
    return ProgramResult("failed" if ran.verdict == "ok" else ran.verdict, stderr=why)


def _parted(stdout: str) -> tuple[list[str], str]:
    """Return the judge's verdicts and the lines for the program. A torn last line is neither."""
    lines = stdout.split("\n")[:-1]
    verdicts = [line for line in lines if line.startswith(VERDICT)]
    return verdicts, "".join(f"{line}\n" for line in lines if not line.startswith(VERDICT))
