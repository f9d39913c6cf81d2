"""Conversations of a program and a judge: their number of results, and their replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from slipstream.rewards.sandbox import conversation
from slipstream.rewards.sandbox.conversation import conversations, replayed
from slipstream.rewards.sandbox.protocol import (
    Program,
    ProgramLimits,
    ProgramResult,
    SandboxError,
    Verdict,
)

PROGRAM, JUDGE = Program("program"), Program("judge")
Run = Callable[[Program, str], ProgramResult]
Replies = Callable[[list[str]], str]


def verdict(place: int, held: bool = True, ended: bool = False) -> str:
    return json.dumps({"verdict": place, "held": held, "why": "", "ended": ended})


def judge(tests: list[list[str]], replies: list[str]) -> str:
    """Return what a judge writes. A test is a list of calls; it holds if all replies are "yes"."""
    lines, left = [], iter(replies)
    for place, calls in enumerate(tests):
        held = True
        for call in calls:
            lines.append(call)
            reply = next(left, None)
            if reply is None:
                lines.append(verdict(place, held=False, ended=True))
                return "\n".join(lines) + "\n"
            held &= reply == "yes"
        lines.append(verdict(place, held))
    return "\n".join(lines) + "\n"


class Service:
    """Runs judge and program on whole inputs. `replies` is the output for the given calls."""

    def __init__(self, tests: list[list[str]], replies: Replies, ended: Verdict = "ok") -> None:
        self.tests, self.replies, self.ended = tests, replies, ended
        self.runs: list[tuple[str, str]] = []
        self.now = 0.0

    def __call__(self, program: Program, stdin: str) -> ProgramResult:
        self.runs.append((program.code, stdin))
        self.now += 1.0
        if program is JUDGE:
            return ProgramResult("ok", judge(self.tests, stdin.splitlines()))
        return ProgramResult(self.ended, self.replies(stdin.splitlines()), "the program's errors")

    def results(self, total_timeout_s: float = 1e9) -> list[ProgramResult]:
        return list(
            replayed(self, PROGRAM, JUDGE, total_timeout_s=total_timeout_s, clock=lambda: self.now)
        )


def says_yes(calls: list[str]) -> str:
    return "yes\n" * len(calls)


def outcomes(results: list[ProgramResult]) -> list[str | bool]:
    """Return whether each test held, or how it ended."""
    return [json.loads(r.stdout)["held"] if r.verdict == "ok" else r.verdict for r in results]


def test_each_call_is_replayed_with_the_lines_so_far() -> None:
    service = Service([["a"], ["b"]], says_yes)
    assert outcomes(service.results()) == [True, True]
    assert service.runs == [
        ("judge", ""),
        ("program", "a\n"),
        ("judge", "yes\n"),
        ("program", "a\nb\n"),
        ("judge", "yes\nyes\n"),
    ]


def test_verdicts_are_not_sent_to_the_program() -> None:
    service = Service([["a", "b"], [], ["c"]], says_yes)
    assert outcomes(service.results()) == [True, True, True]
    assert [stdin for code, stdin in service.runs if code == "program"][-1] == "a\nb\nc\n"


def test_wrong_replies_are_verdicts() -> None:
    service = Service(
        [["a"], ["b"], ["c"]],
        lambda calls: "".join("no\n" if call == "b" else "yes\n" for call in calls),
    )
    assert outcomes(service.results()) == [True, False, True]


def test_tests_without_calls_need_no_run_of_the_program() -> None:
    service = Service([[], []], says_yes)
    assert outcomes(service.results()) == [True, True]
    assert len(service.runs) == 1


@pytest.mark.parametrize("ended", ["ok", "failed", "time", "memory"])
def test_a_program_that_ends_fails_the_test_of_that_time(ended: Verdict) -> None:
    service = Service([["a"], ["b"], ["c"]], lambda calls: "yes\n", ended)
    results = service.results()
    # The test after it has no result: a new conversation continues there.
    assert outcomes(results) == [True, "failed" if ended == "ok" else ended]
    assert results[-1].stderr == "the program's errors"


def test_the_last_result_has_the_seconds() -> None:
    results = Service([["a"], ["b"]], says_yes).results()
    assert [result.seconds for result in results] == [0.0, 5.0]


def test_a_judge_that_the_program_ends_is_a_wrong_answer() -> None:
    """The reply stops the judge before its verdict; its last line is torn."""
    for stopped, expected in (("time", "time"), ("ok", "failed")):

        def run(program: Program, stdin: str, stopped: Verdict = stopped) -> ProgramResult:  # type: ignore[assignment]
            if program is PROGRAM:
                return ProgramResult("ok", "[" * 9 + "\n")
            torn = "" if not stdin else verdict(0)[:20]
            ended = "" if stdin else verdict(0, held=False, ended=True) + "\n"
            return ProgramResult(stopped if stdin else "ok", f"call\n{ended}{torn}")

        results = list(replayed(run, PROGRAM, JUDGE, total_timeout_s=9))
        assert [result.verdict for result in results] == [expected]


def test_a_judge_that_ends_before_the_program_says_anything_yields_nothing() -> None:
    def run(program: Program, stdin: str) -> ProgramResult:
        return ProgramResult("failed", "", "no interpreter")

    assert list(replayed(run, PROGRAM, JUDGE, total_timeout_s=9)) == []


def test_a_program_with_endless_calls_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can return an object without an end, which the judge iterates."""
    monkeypatch.setattr(conversation, "_MAX_ROUNDS", 10)
    service = Service([["next"] * 1000], says_yes)
    (result,) = service.results()
    assert result.verdict == "time"
    assert "10 times" in result.stderr
    assert "reward_model.sandbox_fusion.url" in result.stderr
    assert len(service.runs) == 20


def test_many_calls_in_many_tests_continue_in_a_new_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "_MAX_ROUNDS", 10)
    tests = [["a", "b", "c"]] * 7
    lengths: list[int] = []

    def hold(judge: Program) -> Iterator[ProgramResult]:
        service = Service(tests[int(judge.code) :], says_yes)
        results = service.results()
        lengths.append(len(results))
        return iter(results)

    found = list(
        conversations(
            hold, lambda first: Program(str(first)), 7, ProgramLimits(total_timeout_s=1e9)
        )
    )
    assert outcomes(found) == [True] * 7
    assert lengths == [3, 3, 1]


def test_no_call_follows_the_end_of_the_total_time() -> None:
    service = Service([["a"], ["b"], ["c"]], says_yes)
    results = service.results(total_timeout_s=4.5)
    # Five runs: the judge, and twice the program and the judge.
    assert outcomes(results) == [True, True]
    assert results[-1].seconds == 5.0
    (result,) = Service([["a", "b", "c"]], says_yes).results(total_timeout_s=2.5)
    assert result.verdict == "time"


# Conversations in a row.


def test_no_more_results_than_tests() -> None:
    def hold(judge: Program) -> Iterator[ProgramResult]:
        yield from [ProgramResult("ok")] * 3
        yield ProgramResult("memory")

    assert len(list(conversations(hold, lambda first: JUDGE, 3, ProgramLimits()))) == 3


def test_no_conversation_starts_after_the_total_time() -> None:
    firsts: list[int] = []

    def hold(judge: Program) -> Iterator[ProgramResult]:
        yield ProgramResult("time", seconds=2.0)

    def judge_from(first: int) -> Program:
        firsts.append(first)
        return JUDGE

    limits = ProgramLimits(total_timeout_s=5.0)
    assert len(list(conversations(hold, judge_from, 9, limits))) == 3
    assert firsts == [0, 1, 2]


def test_a_judge_without_a_verdict_is_an_error_of_the_sandbox() -> None:
    with pytest.raises(SandboxError, match="without a verdict"):
        list(conversations(lambda judge: iter(()), lambda first: JUDGE, 2, ProgramLimits()))
