"""Programs that are tested by a judge, which runs in a sandbox of its own.

Each of the two reads the lines that the other writes. A line of the judge that begins with
`VERDICT` is the verdict of a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

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
        for result in hold(judge_from(done)):
            done += 1
            spent += result.seconds
            yield result
        if done == before:
            raise SandboxError("the judge of the tests ended without a verdict")


def replayed(
    run: Callable[[Program, str], ProgramResult], program: Program, judge: Program
) -> Iterator[ProgramResult]:
    """Hold a conversation in a sandbox that can only run a program on a whole input.

    Program and judge are run again for each call, with all lines so far. So the program must be
    deterministic. Raises SandboxError after too many calls.
    """
    to_program, to_judge = "", ""
    for _ in range(_MAX_ROUNDS):
        judged = run(judge, to_judge)
        lines = judged.stdout.splitlines(keepends=True)
        verdicts = [line.strip() for line in lines if line.startswith(VERDICT)]
        calls = "".join(line for line in lines if not line.startswith(VERDICT))
        if calls == to_program:
            for line in verdicts:
                yield ProgramResult("ok", line)
            return
        ran = run(program, calls)
        if ran.stdout == to_judge:
            # No reply to the new call: the program ended or reached a limit.
            for line in verdicts:
                if not json.loads(line)["ended"]:
                    yield ProgramResult("ok", line)
            yield ProgramResult(ran.verdict if ran.verdict != "ok" else "failed", "", ran.stderr)
            return
        to_program, to_judge = calls, ran.stdout
    raise SandboxError(
        f"the tests call the program more than {_MAX_ROUNDS} times, and a service runs it again "
        "for each call; run programs on this machine: unset reward_model.sandbox_fusion.url"
    )
